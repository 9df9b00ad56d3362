//! Child processes of a bench: this same executable with a hidden command, which end when their standard input does.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::worker::Outcome;

/// A child that answers a line with a line.
#[derive(Debug)]
pub struct Helper {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Helper {
    /// Starts `netvm ARGS`. With `own_group` a Ctrl-C at the terminal does not reach it: it ends by its input.
    ///
    /// # Errors
    /// That of starting a process.
    pub fn start(args: &[String], own_group: bool) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        if own_group {
            command.process_group(0);
        }
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or("child without output")?);
        Ok(Self { child, input, output })
    }

    /// Process id of the child.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Next line of the child.
    ///
    /// # Errors
    /// When it has ended; what it printed on standard error says why.
    pub fn line(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            let status = self.child.wait()?;
            return Err(format!("a process of the bench ended early ({status})").into());
        }
        Ok(line.trim_end().to_string())
    }

    /// Sends the child a line.
    ///
    /// # Errors
    /// When it has ended.
    pub fn tell(&mut self, line: &str) -> Result<(), Box<dyn Error>> {
        let input = self.input.as_mut().ok_or("child without input")?;
        Ok(writeln!(input, "{line}")?)
    }

    /// Has a worker do something and waits for the outcome.
    ///
    /// # Errors
    /// When the worker reports one or has ended.
    pub fn ask(&mut self, command: &str) -> Result<Outcome, Box<dyn Error>> {
        let input = self.input.as_mut().ok_or("child without input")?;
        writeln!(input, "{command}")?;
        let outcome: Outcome = serde_json::from_str(&self.line()?)?;
        if outcome.error.is_empty() {
            Ok(outcome)
        } else {
            Err(format!("{command}: {}", outcome.error).into())
        }
    }

    /// Ends the child by closing its input and waits for it: it may have something to clean up.
    pub fn finish(mut self) {
        drop(self.input.take());
        // Whatever it still says is of no use.
        let _ = std::io::copy(&mut self.output, &mut std::io::sink());
        let _ = self.child.wait();
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if self.input.take().is_some() {
            let _ = std::io::copy(&mut self.output, &mut std::io::sink());
            let _ = self.child.wait();
        }
    }
}
