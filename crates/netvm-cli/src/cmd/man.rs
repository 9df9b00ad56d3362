//! `netvm man`: manual pages, made from the command line's own definition.

use super::Outcome;
use clap::{Args, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `netvm man`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  netvm man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// Folder for the pages; it is created if need be
    folder: PathBuf,
}

/// An explanation on a line of its own is indented by more than a command.
const DEEP: &str = "          ";
/// Between a command and its explanation on the same line.
const GAP: &str = "   ";

pub fn run(args: &ManArgs, command: Command) -> Outcome {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    std::fs::create_dir_all(&args.folder)
        .and_then(|()| write_pages(&args.folder, &command))
        .map_err(|error| format!("cannot write manual pages to {}: {error}", args.folder.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// The page of a command, and those of its commands.
fn write_pages(folder: &Path, command: &Command) -> io::Result<()> {
    let visible = || command.get_subcommands().filter(|command| !command.is_hide_set());
    for command in visible() {
        write_pages(folder, command)?;
    }
    // An empty date would be left out, and the version stand in its place.
    let man = Man::new(command.clone()).date(" ").manual("netvm");
    let man = man.source(concat!("netvm ", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    synopsis(command).to_writer(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if visible().next().is_some() {
        man.render_subcommands_section(&mut page)?;
    }
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    after_options(&text).to_writer(&mut page)?;
    std::fs::write(folder.join(man.get_filename()), page)
}

/// As `--help` has it: clap's own pages name all options, without their values.
fn synopsis(command: &Command) -> Roff {
    let usage = command.clone().render_usage().to_string();
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]);
    for line in usage.trim_start_matches("Usage:").lines().map(str::trim).filter(|line| !line.is_empty()) {
        let parts = line.split_inclusive(' ').map(|word| {
            let is_value = word.contains(['<', '[']);
            if is_value { italic(word) } else { bold(word) }
        });
        roff.text(parts.collect::<Vec<Inline>>()).control("br", []);
    }
    roff
}

/// How paragraphs begin that have a section of their own; the others are notes.
const SECTIONS: [(&str, &str); 3] =
    [("Exit code", "EXIT STATUS"), ("Environment:", "ENVIRONMENT"), ("Example", "EXAMPLES")];

/// What stands behind the options, in sections.
fn after_options(text: &str) -> Roff {
    let section_of = |paragraph: &str| {
        SECTIONS.iter().find(|(begin, _)| paragraph.starts_with(begin)).map_or("NOTES", |(_, name)| name)
    };
    let mut roff = Roff::new();
    for name in ["NOTES", "EXIT STATUS", "ENVIRONMENT", "EXAMPLES"] {
        let paragraphs =
            text.split("\n\n").filter(|text| !text.trim().is_empty() && section_of(text) == name);
        for (index, paragraph) in paragraphs.enumerate() {
            if index == 0 {
                roff.control("SH", [name]);
            }
            match name {
                "ENVIRONMENT" | "EXAMPLES" => show_terms(paragraph, &mut roff),
                _ => show(paragraph, &mut roff),
            }
        }
    }
    roff
}

fn show(paragraph: &str, roff: &mut Roff) {
    roff.control("PP", []);
    // Lists and tables stay as they are.
    let is_list = paragraph.lines().any(|line| line.starts_with(' '));
    if is_list {
        roff.control("nf", []);
    }
    for line in paragraph.lines() {
        roff.text([roman(line)]);
    }
    if is_list {
        roff.control("fi", []);
    }
}

/// Behind a line of its own: commands, or names, and what each is for.
fn show_terms(paragraph: &str, roff: &mut Roff) {
    for line in paragraph.lines().skip(1) {
        match line.trim().split_once(GAP) {
            _ if line.starts_with(DEEP) => roff.text([roman(line.trim())]),
            Some((term, why)) => roff.control("TP", []).text([bold(term)]).text([roman(why.trim_start())]),
            None => roff.control("TP", []).text([bold(line.trim())]),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::{ManArgs, after_options, run};
    use std::process::Command;

    #[test]
    fn every_command_has_a_page_that_groff_reads() {
        let folder = std::env::temp_dir().join(format!("netvm-man-{}", std::process::id()));
        run(&ManArgs { folder: folder.clone() }, crate::described()).unwrap();
        let pages: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|page| page.unwrap().path()).collect();
        let text = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        assert!(pages.len() > 30 && text("netvm-swap-on.1").contains(".SH EXAMPLES\n"), "{pages:?}");
        // Else groff makes other quotes of them.
        assert!(text("netvm-run.1").contains("\\*(Aqfirst && second\\*(Aq"), "{}", text("netvm-run.1"));
        assert!(
            text("netvm-run.1").contains(".SH SYNOPSIS\n\\fBnetvm \\fR\\fBrun \\fR"),
            "{}",
            text("netvm-run.1")
        );
        let checked = Command::new("groff").args(["-man", "-Tutf8", "-ww", "-z"]).args(&pages).output();
        match checked {
            Ok(said) => assert!(said.status.success() && said.stderr.is_empty(), "{said:?}"),
            Err(error) => println!("pages are not read: skipped (groff: {error})"),
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn examples_stay_apart_from_what_they_are_for() {
        let text = "What it does\nat length.\n\nExamples:\n  netvm one    for one\n  netvm two \"x\"\n                  for two\n  netvm three\n\n\
                    Environment:\n  NAME   what it does\n\nExit code: 0.";
        let page = after_options(text).to_roff();
        let (notes, examples) = page.split_once(".SH EXAMPLES\n").unwrap();
        assert!(
            notes.ends_with(
                ".SH NOTES\n.PP\nWhat it does\nat length.\n.SH \"EXIT STATUS\"\n.PP\nExit code: 0.\n\
                 .SH ENVIRONMENT\n.TP\n\\fBNAME\\fR\nwhat it does\n"
            ),
            "{page}"
        );
        let expected = ".TP\n\\fBnetvm one\\fR\nfor one\n.TP\n\\fBnetvm two \"x\"\\fR\nfor two\n.TP\n\\fBnetvm three\\fR\n";
        assert_eq!(examples, expected);
        assert!(!after_options("").to_roff().contains(".SH"));
    }
}
