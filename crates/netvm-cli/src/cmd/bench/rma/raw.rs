//! The floors of `netvm bench rma`: bare sockets of the same kind, between the same two processes.

use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::super::sweeper::Sweeper;
use super::timing::{self, Sample};
use super::{Link, shm};

/// Least memory that streams go round in, so that sizes are compared at the same distance from the cache.
pub const AREA_BYTES: usize = 256 << 10;
const TIMEOUT: Duration = Duration::from_secs(5);

/// A connection of either kind.
pub trait Socket: Read + Write + Send {
    fn poll_only(&self) -> std::io::Result<()>;
    fn end(&self) -> std::io::Result<()>;
}

macro_rules! socket {
    ($($kind:ty)*) => {$(
        impl Socket for $kind {
            fn poll_only(&self) -> std::io::Result<()> {
                self.set_nonblocking(true)
            }

            fn end(&self) -> std::io::Result<()> {
                self.shutdown(std::net::Shutdown::Write)
            }
        }
    )*};
}
socket!(TcpStream UnixStream);

/// What a client asks for with its first bytes.
const ECHO: u8 = b'e';
const ECHO_POLLING: u8 = b'p';
const SINK: u8 = b's';

/// Where the floors are served. Dropping it removes the socket's file; who is served goes on.
pub struct Floors {
    pub address: String,
    _sweeper: Option<Sweeper>,
}

/// Serves the floors on a thread until the process ends.
///
/// # Errors
/// When there is no such kind of socket here.
pub fn serve(link: Link) -> Result<Floors, Box<dyn Error>> {
    match link {
        Link::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let address = listener.local_addr()?.to_string();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let _ = stream.set_nodelay(true);
                    // A client that has gone is nothing to report.
                    let _ = serve_one(Box::new(stream));
                }
            });
            Ok(Floors { address, _sweeper: None })
        }
        Link::Unix | Link::Shm => {
            let path = std::env::temp_dir().join(format!("netvm-rma-raw-{}", std::process::id()));
            // One that had this number before, and was killed.
            let _ = std::fs::remove_file(&path);
            let sweeper = Sweeper::start(&path)?;
            let listener = UnixListener::bind(&path)?;
            let address = path.display().to_string();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let _ = serve_one(Box::new(stream));
                }
            });
            Ok(Floors { address, _sweeper: Some(sweeper) })
        }
    }
}

fn serve_one(mut socket: Box<dyn Socket>) -> std::io::Result<()> {
    let mut wish = [0; 9];
    socket.read_exact(&mut wish)?;
    let size = u64::from_le_bytes(wish[1..].try_into().unwrap_or_default());
    // Of an echo: what comes and what goes back.
    let (size, back) = ((size & u64::from(u32::MAX)) as usize, (size >> 32) as usize);
    match wish[0] {
        shm::ECHO => shm::serve(size),
        ECHO | ECHO_POLLING => {
            if wish[0] == ECHO_POLLING {
                socket.poll_only()?;
            }
            let (mut bytes, answer) = (vec![0; size], vec![7; back]);
            loop {
                read_all(&mut *socket, &mut bytes)?;
                write_all(&mut *socket, &answer)?;
            }
        }
        _ => {
            let mut bytes = vec![0; size.max(AREA_BYTES)];
            let mut total = 0u64;
            loop {
                match socket.read(&mut bytes)? {
                    0 => return socket.write_all(&total.to_le_bytes()),
                    count => total += count as u64,
                }
            }
        }
    }
}

fn read_all(socket: &mut dyn Socket, mut bytes: &mut [u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match socket.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write_all(socket: &mut dyn Socket, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Asks the other side for something.
///
/// # Errors
/// When nobody is there.
pub fn connect(link: Link, address: &str, wish: u8, size: usize) -> Result<Box<dyn Socket>, Box<dyn Error>> {
    let mut socket: Box<dyn Socket> = match link {
        Link::Tcp => {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            Box::new(stream)
        }
        Link::Unix | Link::Shm => {
            let stream = UnixStream::connect(address)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            Box::new(stream)
        }
    };
    socket.write_all(&[wish])?;
    socket.write_all(&(size as u64).to_le_bytes())?;
    Ok(socket)
}

/// Round trips of so many bytes there and back.
///
/// # Errors
/// When the connection fails.
pub fn round_trip(
    link: Link,
    address: &str,
    (size, back): (usize, usize),
    polling: bool,
    time: Duration,
) -> Result<Sample, Box<dyn Error>> {
    let wish = if polling { ECHO_POLLING } else { ECHO };
    let mut socket = connect(link, address, wish, size | back << 32)?;
    if polling {
        socket.poll_only()?;
    }
    let (bytes, mut answer) = (vec![7; size], vec![0; back]);
    timing::latency(time, 1, || {
        write_all(&mut *socket, &bytes)?;
        Ok(read_all(&mut *socket, &mut answer)?)
    })
}

/// GB/s of sends of `size` bytes, until the other side has them all.
///
/// # Errors
/// When the connection fails or bytes are missing.
pub fn stream(link: Link, address: &str, size: usize, time: Duration) -> Result<Sample, Box<dyn Error>> {
    let mut socket = connect(link, address, SINK, size)?;
    let source = vec![7; size.max(AREA_BYTES)];
    let (start, mut sends, mut at) = (Instant::now(), 0u64, 0);
    while start.elapsed() < time {
        for _ in 0..16 {
            socket.write_all(&source[at..at + size])?;
            at = if at + 2 * size > source.len() { 0 } else { at + size };
            sends += 1;
        }
    }
    socket.end()?;
    let mut total = [0; 8];
    socket.read_exact(&mut total)?;
    let elapsed = start.elapsed();
    if u64::from_le_bytes(total) != sends * size as u64 {
        return Err("the bare stream lost bytes".into());
    }
    Ok(Sample::of_rate(sends, size, elapsed))
}
