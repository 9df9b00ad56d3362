//! What the network and the file system take together, without any file transfer: bare TCP streams, each written into its own part of a new file,
//! and nothing checked.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use super::super::floors::STREAM_BYTES;
use super::Failure;

/// GB/s of `bytes` that are sent from memory over so many connections into a file in `folder`, which goes again.
pub fn into_file(folder: &Path, bytes: u64, streams: u64) -> Result<f64, Failure> {
    let path = folder.join("floor");
    let file = File::create(&path)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let mut pairs = Vec::new();
    for _ in 0..streams {
        let from = TcpStream::connect(address)?;
        pairs.push((from, listener.accept()?.0));
    }
    let begun = Instant::now();
    let share = bytes / streams;
    let done = std::thread::scope(|scope| {
        let mut running = Vec::new();
        for (index, (from, to)) in (0..streams).zip(pairs) {
            let start = index * share;
            let end = if index + 1 == streams { bytes } else { start + share };
            running.push(scope.spawn(move || send(from, end - start)));
            let file = &file;
            running.push(scope.spawn(move || receive(to, file, start, end)));
        }
        running.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    let seconds = begun.elapsed().as_secs_f64();
    let gone = fs::remove_file(&path);
    for result in done {
        result.map_err(|_| "a thread of a bare stream ended early")??;
    }
    gone?;
    Ok(bytes as f64 / seconds / 1e9)
}

fn send(mut to: TcpStream, bytes: u64) -> std::io::Result<()> {
    let block = vec![0x5A; STREAM_BYTES];
    let mut left = bytes;
    while left > 0 {
        let step = left.min(block.len() as u64);
        to.write_all(&block[..step as usize])?;
        left -= step;
    }
    Ok(())
}

fn receive(mut from: TcpStream, file: &File, start: u64, end: u64) -> std::io::Result<()> {
    let mut block = vec![0; STREAM_BYTES];
    let mut at = start;
    while at < end {
        let step = &mut block[..(end - at).min(STREAM_BYTES as u64) as usize];
        from.read_exact(step)?;
        file.write_all_at(step, at)?;
        at += step.len() as u64;
    }
    Ok(())
}
