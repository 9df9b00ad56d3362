//! Programs that others send files with.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::super::block::find;
use super::{Failure, Running, Way};

/// The program that a way needs and that is not here.
pub fn missing(way: Way) -> Option<&'static str> {
    let program = match way {
        Way::Netvm("device", ..) => {
            let is_there = Path::new(netvm_sys::device::CONTROL).exists();
            return (!is_there).then_some("the kernel module netvm_mem");
        }
        Way::Netvm(..) | Way::Floor(_) => return None,
        Way::Socat => "socat",
        Way::Rsync => "rsync",
    };
    find(program).is_none().then_some(program)
}

fn free_port() -> Result<u16, Failure> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn quiet(command: &mut Command) -> &mut Command {
    netvm_sys::signal::die_with_parent(command);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped())
}

/// Seconds for all files one after the other, each with a connection of its own, in blocks of 256 KiB.
pub fn socat(files: &[PathBuf], target: &Path) -> Result<f64, Failure> {
    let mut seconds = 0.0;
    for file in files {
        let port = free_port()?;
        let arrives = target.join(file.file_name().unwrap_or_default());
        let mut receiver = Command::new("socat");
        receiver.args(["-u", "-b", "262144", &format!("TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr")]);
        receiver.arg(format!("CREATE:{}", arrives.display()));
        let receiver = Running(quiet(&mut receiver).spawn()?);
        // It tells nobody when it listens; a sender that comes too early tries again.
        let begun = Instant::now();
        let mut sender = Command::new("socat");
        sender.args(["-u", "-b", "262144"]).arg(format!("FILE:{}", file.display()));
        sender.arg(format!("TCP:127.0.0.1:{port},retry=1000,interval=0.001"));
        Running(quiet(&mut sender).spawn()?).wait("socat")?;
        receiver.wait("socat")?;
        seconds += begun.elapsed().as_secs_f64();
    }
    Ok(seconds)
}

/// Seconds for all files, whole, to a daemon.
pub fn rsync(files: &[PathBuf], target: &Path, folder: &Path) -> Result<f64, Failure> {
    let port = free_port()?;
    let config = folder.join("rsyncd.conf");
    let text = format!(
        "address = 127.0.0.1\nuse chroot = no\n[target]\npath = {}\nread only = no\n",
        target.display()
    );
    // As who we are: it would become nobody.
    let user = "uid = 0\ngid = 0\n";
    let is_root = fs::metadata("/proc/self")?.uid() == 0;
    fs::write(&config, if is_root { format!("{user}{text}") } else { text })?;
    let mut daemon = Command::new("rsync");
    daemon.args(["--daemon", "--no-detach", &format!("--port={port}")]);
    daemon.arg(format!("--config={}", config.display()));
    let _daemon = Running(quiet(&mut daemon).spawn()?);
    let deadline = Instant::now() + Duration::from_secs(5);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if Instant::now() > deadline {
            return Err("rsync --daemon did not start".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut sender = Command::new("rsync");
    sender.arg("--whole-file").args(files).arg(format!("rsync://127.0.0.1:{port}/target/"));
    let begun = Instant::now();
    Running(quiet(&mut sender).spawn()?).wait("rsync")?;
    Ok(begun.elapsed().as_secs_f64())
}
