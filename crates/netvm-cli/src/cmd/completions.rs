//! `netvm completions`: made from the command line's own definition.

use super::Outcome;
use clap::{Args, Command};
use clap_complete::Shell;
use std::io::{self, Write};
use std::process::ExitCode;

/// Arguments of `netvm completions`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  netvm completions bash > /etc/bash_completion.d/netvm")]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Without the commands that netvm calls by itself, which shells would offer, too.
fn for_people(command: &Command) -> Command {
    // clap removes none: the command is made anew, with its options.
    let name: &str = command.get_name().to_owned().leak();
    let mut shown = Command::new(name);
    if let Some(about) = command.get_about() {
        shown = shown.about(about.clone());
    }
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
    shown.args(command.get_arguments()).groups(command.get_groups()).subcommands(commands.map(for_people))
}

pub fn run(args: &CompletionsArgs, command: Command) -> Outcome {
    let mut command = for_people(&command);
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "netvm", &mut script);
    io::stdout().write_all(&script).map_err(|error| format!("cannot write the script: {error}"))?;
    Ok(ExitCode::SUCCESS)
}
