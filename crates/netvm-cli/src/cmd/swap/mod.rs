//! `netvm swap`: lent memory as swap of this machine. docs/design/swap.md has the whole.

mod by;
mod off;
mod on;
mod reserve;
mod serve;
mod status;
mod table;

pub use serve::protect;

use super::Outcome;
use clap::{Args, Subcommand};

/// Arguments of `netvm swap`.
#[derive(Args, Debug)]
pub struct SwapArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Add lent memory to this machine's swap
    On(on::OnArgs),
    /// Bring everything back and return the memory to its lenders
    Off(off::OffArgs),
    /// Show the swap that is on lent memory
    Status(status::StatusArgs),
}

impl SwapArgs {
    /// Whether it changes nothing.
    pub fn only_prints(&self) -> bool {
        matches!(self.action, Action::Status(_))
    }
}

pub fn run(args: &SwapArgs) -> Outcome {
    match &args.action {
        Action::On(args) if args.is_server() => serve::run(args),
        Action::On(args) => on::run(args),
        Action::Off(args) => off::run(args),
        Action::Status(args) => status::run(args),
    }
}
