//! Other processes of a test.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use netvm::node::RemoteKey;

/// What a process finds its role in.
pub const ROLE: &str = "NETVM_TEST_ROLE";

/// Another process, which runs the test `process` of this binary with a role.
pub struct Process {
    child: Child,
    /// What it said when it was ready.
    pub said: Vec<String>,
}

impl Process {
    pub fn start(role: &str) -> Self {
        Self::start_with(Command::new(std::env::current_exe().unwrap()), role)
    }

    pub fn start_with(mut command: Command, role: &str) -> Self {
        let command = command.args(["--exact", "--ignored", "--nocapture", "process"]);
        let mut child = command.env(ROLE, role).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let ready = lines.find_map(|line| line.split_once("ready ").map(|(_, rest)| rest.to_owned()));
        let said = ready.unwrap_or_default().split(' ').map(str::to_owned).collect();
        // What it says at its end must go somewhere.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, said }
    }

    pub fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
        if signal == "-STOP" {
            // Its threads on other CPUs run on for a moment, and may still answer.
            while !self.is_stopped() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }

    /// Whether all of its threads are.
    fn is_stopped(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let stats = threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("stat")));
        stats.flatten().all(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")))
    }

    pub fn key(&self, at: usize) -> RemoteKey {
        key(&self.said[at])
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn hex(key: RemoteKey) -> String {
    format!("{:032x}", u128::from_be_bytes(key.to_bytes()))
}

/// Back from [`hex`].
pub fn key(text: &str) -> RemoteKey {
    RemoteKey::from_bytes(u128::from_str_radix(text, 16).unwrap().to_be_bytes())
}
