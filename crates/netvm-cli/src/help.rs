//! Help texts that a terminal of any width wraps once.

use clap::Command;

/// No terminal is taken to be wider.
pub const COLUMNS: usize = 100;

/// Texts after the options are written in lines of the source, which are longer than a terminal's: wrapped as they are, every other line would
/// have a few words only.
pub fn flowing(command: Command) -> Command {
    let text = command.get_after_help().map(|text| unwrapped(&text.to_string()));
    let command = match text {
        Some(text) => command.after_help(text),
        None => command,
    };
    command.mut_subcommands(flowing)
}

/// Lines that were only broken for their length become one; what is indented, and lists, stay.
fn unwrapped(text: &str) -> String {
    let mut flowing = String::with_capacity(text.len());
    let mut last = "";
    for line in text.split('\n') {
        let goes_on = last.len() > COLUMNS
            && [last, line].iter().all(|line| !line.is_empty() && !line.starts_with(' '));
        if !flowing.is_empty() {
            flowing.push(if goes_on { ' ' } else { '\n' });
        }
        flowing.push_str(line);
        last = line;
    }
    flowing
}

#[cfg(test)]
mod tests {
    use super::unwrapped;

    #[test]
    fn only_what_was_broken_for_its_length_is_put_together() {
        let long = "word ".repeat(25).trim_end().to_owned();
        let text = format!("{long}\n{long}\nend.\nShort.\n\n{long}\n\nExamples:\n  {long}\n  netvm run\n");
        let flowing = format!("{long} {long} end.\nShort.\n\n{long}\n\nExamples:\n  {long}\n  netvm run\n");
        assert_eq!(unwrapped(&text), flowing);
    }
}
