//! `netvm secret`: the secret that lenders and borrowers share, and the options by which other commands take it.

use super::Outcome;
use clap::{Args, Subcommand};
use netvm::security::{Encryption, Secret, Security};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

/// Names the secret file when --secret does not.
const SECRET_FILE: &str = "NETVM_SECRET_FILE";

/// Arguments of `netvm secret`.
#[derive(Args, Debug)]
#[command(after_help = "\
Whoever has the file can use the lenders' memory and read what others store there: copy it over a safe channel.

Examples:
  netvm secret new ~/.netvm-secret
  scp -p ~/.netvm-secret big:                       the same file on every machine
  ssh big netvm lend --size 8G --listen 0.0.0.0:7070 --secret .netvm-secret
  netvm run --lender big:7070 --secret ~/.netvm-secret -- python3 job.py")]
pub struct SecretArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Write a new random secret into a file that only you can read
    New {
        /// The file; it must not exist
        file: PathBuf,
    },
}

pub fn run(args: &SecretArgs) -> Outcome {
    let Action::New { file } = &args.action;
    let (secret, was_there) = (Secret::random()?, file.symlink_metadata().is_ok());
    secret.write_new_file(file).inspect_err(|_| {
        if !was_there {
            remove_begun(&secret, file);
        }
    })?;
    out!("netvm: wrote {}; give lenders and borrowers a copy each, and --secret", file.display());
    Ok(ExitCode::SUCCESS)
}

/// A part of a secret is none, and would be in the way of the next try. What somebody else has made there meanwhile is kept.
fn remove_begun(secret: &Secret, file: &Path) {
    let is_ours = |begun: Vec<u8>| secret.to_content().as_bytes().starts_with(&begun);
    if file.symlink_metadata().is_ok_and(|metadata| metadata.is_file())
        && std::fs::read(file).is_ok_and(is_ours)
    {
        let _ = std::fs::remove_file(file);
    }
}

/// Options of every command that connects or is connected to.
#[derive(Args, Clone, Debug, Default)]
pub struct SecurityArgs {
    /// File with the secret that lender and borrower share [env: NETVM_SECRET_FILE]
    #[arg(long, value_name = "FILE")]
    secret: Option<PathBuf>,
    /// Encrypt everything on the way; needs a secret
    #[arg(long)]
    encrypt: bool,
    /// What was read: a pipe can be read once.
    #[arg(skip)]
    loaded: OnceLock<Option<Secret>>,
}

impl SecurityArgs {
    /// Reads the secret.
    ///
    /// # Errors
    /// A sentence with the remedy.
    pub fn load(&self) -> netvm::Result<Security> {
        let secret = match self.loaded.get() {
            Some(loaded) => loaded.clone(),
            None => {
                let from_environment = || std::env::var_os(SECRET_FILE).filter(|path| !path.is_empty());
                let file = self.secret.clone().or_else(|| from_environment().map(PathBuf::from));
                let secret = file.map(|file| Secret::from_file(&file)).transpose()?;
                self.loaded.get_or_init(|| secret).clone()
            }
        };
        let security = Security { secret, encryption: self.encryption(), insecure: false };
        security.check()?;
        Ok(security)
    }

    /// Whether the secret comes on standard input (`--secret -`).
    pub fn is_on_input(&self) -> bool {
        self.secret.as_ref().is_some_and(|file| file.as_os_str() == "-")
    }

    /// With a secret that lives as long as one run and its private lender.
    ///
    /// # Errors
    /// Without random numbers.
    pub fn ephemeral(&self) -> netvm::Result<Security> {
        Ok(self.with(Secret::random()?))
    }

    /// With a secret that came another way.
    pub fn with(&self, secret: Secret) -> Security {
        Security { secret: Some(secret), encryption: self.encryption(), insecure: false }
    }

    fn encryption(&self) -> Encryption {
        if self.encrypt { Encryption::Always } else { Encryption::IfAsked }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_begun_is_removed() {
        let file = std::env::temp_dir().join(format!("netvm-begun-{}", std::process::id()));
        let secret = Secret::random().unwrap();
        let content = secret.to_content();
        for (found, is_removed) in
            [("", true), (&content[..20], true), (&content[..], true), ("other", false)]
        {
            std::fs::write(&file, found).unwrap();
            remove_begun(&secret, &file);
            assert_eq!(!file.exists(), is_removed, "{} bytes", found.len());
        }
        std::fs::remove_file(&file).unwrap();
    }
}
