//! Lines from many processes, in one place: a channel with a ring for each sender.
//!
//! ```text
//! collect_lines listen 0.0.0.0:7070 PROCESSES       prints the command for the senders, then their lines
//! tail -f log | collect_lines connect HOST:7070 KEY
//! ```

use std::io::BufRead;

use netvm::channel::{ChannelError, Receiver, Sender, Shape};
use netvm::node::{Node, RemoteKey};
use netvm::security::{Secret, Security};

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["listen", address, processes] => listen(address, processes.parse()?),
        ["connect", address, key] => connect(address, RemoteKey::from_text(key).ok_or("not a key")?),
        _ => Err("usage: collect_lines listen ADDRESS PROCESSES | connect ADDRESS KEY".into()),
    }
}

fn listen(address: &str, processes: u32) -> Result {
    let node = start()?;
    let shape = Shape::Rings { senders: processes, bytes: 64 << 10 };
    let (key, mut receiver) = Receiver::new(&node, "lines", shape)?;
    println!("collect_lines connect {} {}", node.listen(address)?, key.to_text());
    let mut ended = 0;
    while ended < processes {
        match receiver.receive(None) {
            // The line is still where its sender has written it; dropping the message frees the place.
            Ok(line) => println!("{}: {}", line.sender(), String::from_utf8_lossy(&line.to_vec())),
            Err(ChannelError::Left { sender }) => {
                println!("{sender} has finished");
                ended += 1;
            }
            Err(ChannelError::Lost { sender }) => {
                println!("{sender} has died");
                ended += 1;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn connect(address: &str, key: RemoteKey) -> Result {
    let node = start()?;
    let mut sender = Sender::open(&node.connect(address)?, "lines", &key)?;
    for line in std::io::stdin().lock().lines() {
        sender.send(line?.as_bytes(), None)?;
    }
    // Returns when the receiver's memory has everything.
    Ok(sender.close()?)
}

/// Machines on a network share a secret: `netvm secret new FILE`, and `NETVM_SECRET_FILE=FILE` for all.
fn start() -> Result<Node> {
    let file = std::env::var_os("NETVM_SECRET_FILE");
    let secret = file.map(|file| Secret::from_file(file.as_ref())).transpose()?;
    Ok(Node::with_security(Security { secret, ..Security::default() })?)
}
