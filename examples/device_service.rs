//! Serves programs that know nothing of netvm: they have this segment as a device of the kernel module, write a request into it, and find
//! the answer there.
//!
//! ```text
//! device_service 0.0.0.0:7070 KEYFILE       makes the key, and prints the command that makes the device
//! ```
//!
//! A request is text at the beginning of the segment, up to a line's end; notification 0 tells of it. The answer, the same backwards, is
//! at 4096, and the device is notified of 1. What is behind 8192 belongs to whoever uses the device.

use std::path::Path;
use std::time::Duration;

use netvm::node::{Node, Rights};
use netvm::notify::Notify;
use netvm::security::{Secret, Security};

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const BYTES: usize = 1 << 20;
const ANSWER: usize = 4096;
const REQUEST_BYTES: usize = 100;
const ASKED: u16 = 0;
const ANSWERED: u16 = 1;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [address, key_file] = &args[..] else { return Err("usage: device_service ADDRESS KEYFILE".into()) };
    // Machines on a network share a secret: `netvm secret new FILE`, and `NETVM_SECRET_FILE=FILE` for all.
    let file = std::env::var_os("NETVM_SECRET_FILE");
    let secret = file.map(|file| Secret::from_file(file.as_ref())).transpose()?;
    let node = Node::with_security(Security { secret, ..Security::default() })?;
    let memory = Node::memory(BYTES)?;
    let (key, board) = node.export_notified("service", memory.clone(), Rights::ReadWrite, 1)?;
    std::fs::write(Path::new(key_file), key.to_text() + "\n")?;
    let address = node.listen(address)?;
    println!("netvm device attach --segment service --at {address} --key {key_file} --board-key {key_file}");
    let mut devices = Vec::new();
    loop {
        let asked = board.wait(ASKED, Some(Duration::from_millis(200))) && board.acknowledge(ASKED);
        // Whoever has asked came before.
        while let Some(peer) = node.accept(Duration::ZERO) {
            // The device's end of the connection: the same key opens it. Others only use the segment.
            devices.extend(peer.import("netvm_mem", &key));
        }
        if !asked {
            continue;
        }
        let mut request = [0; REQUEST_BYTES];
        memory.shared().read_into(0, &mut request).ok_or("no request")?;
        let end = request.iter().position(|&byte| byte == b'\n').unwrap_or(request.len());
        request[..end].reverse();
        memory.shared().write_from(ANSWER, &request).ok_or("no answer")?;
        // All devices are told; those that have gone are forgotten.
        devices.retain(|device| device.notify(Notify::Count { number: ANSWERED }).is_ok());
    }
}
