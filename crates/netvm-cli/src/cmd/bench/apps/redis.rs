//! redis: a server with so many keys, asked by redis-benchmark, its own load generator.

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::measure::{Outcome, tail};

/// Bytes of a value.
const VALUE_BYTES: u32 = 2048;
/// Nothing here takes so long.
const PATIENCE: Duration = Duration::from_secs(600);

/// No port, no files.
pub const ARGUMENTS: [&str; 12] = [
    "--port",
    "0",
    "--save",
    "",
    "--unixsocket",
    "redis.sock",
    "--enable-debug-command",
    "yes",
    "--daemonize",
    "no",
    "--io-threads",
    "1",
];

/// What is asked of it.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub keys: u32,
    pub requests: u32,
}

/// A server that does not outlive its bench.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Load {
    /// Starts the server, fills it, checks what is in it, and has half of the requests read and half write.
    ///
    /// # Errors
    /// When one of the programs fails.
    pub fn ask(&self, mut command: Command, folder: &Path) -> Result<(Outcome, String), Box<dyn Error>> {
        let (socket, said) = (folder.join("redis.sock"), folder.join("redis.err"));
        let _ = std::fs::remove_file(&socket);
        let err = std::fs::File::create(&said)?;
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(err).spawn();
        let mut server = Server(child.map_err(|error| format!("redis-server: {error}"))?);
        let started = Instant::now();
        while cli(&socket, &["ping"], None).is_err() {
            if server.0.try_wait()?.is_some() || started.elapsed() > PATIENCE {
                return Err(format!(
                    "redis-server does not answer: {}",
                    tail(&std::fs::read_to_string(&said)?)
                )
                .into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        cli(&socket, &["--pipe"], Some(self.keys))?;
        let digest = cli(&socket, &["debug", "digest"], None)?;
        let (per_s, p50_us, p99_us) = self.benchmark(&socket)?;
        // Each key that was set has the contents that redis-benchmark gives it; those it did not reach, what they had.
        let count = cli(&socket, &["dbsize"], None)?;
        cli(&socket, &["shutdown", "nosave"], None).or_else(|error| match server.0.try_wait() {
            Ok(_) => Ok(String::new()),
            Err(_) => Err(error),
        })?;
        let status = server.0.wait()?;
        let said = std::fs::read_to_string(&said)?;
        if !status.success() {
            return Err(format!("redis-server: {status}: {}", tail(&said)).into());
        }
        let mut outcome = Outcome::new(format!("{} {}", digest.trim(), count.trim()).as_bytes(), p50_us);
        (outcome.p99, outcome.per_s) = (Some(p99_us), Some(per_s));
        Ok((outcome, said))
    }

    /// Requests per second, and the latency of a read in microseconds: median and 99th percentile.
    fn benchmark(&self, socket: &Path) -> Result<(f64, f64, f64), Box<dyn Error>> {
        let output = Command::new("redis-benchmark")
            .arg("-s")
            .arg(socket)
            .args(["-c", "16", "--csv", "-d", &VALUE_BYTES.to_string(), "-r", &self.keys.to_string()])
            .args(["-n", &self.requests.to_string(), "-t", "get,set"])
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("redis-benchmark: {error}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let of = |test: &str| numbers(&text, test).ok_or_else(|| format!("redis-benchmark said {text:?}"));
        let (set, get) = (of("SET")?, of("GET")?);
        // As many of each, one after the other.
        let per_s = 2.0 / (1.0 / set.0 + 1.0 / get.0);
        Ok((per_s, get.1, get.2))
    }
}

/// Of a line `"GET","rps","avg","min","p50","p95","p99","max"`: requests per second, p50 and p99 in microseconds.
fn numbers(text: &str, test: &str) -> Option<(f64, f64, f64)> {
    let line = text.lines().find(|line| line.starts_with(&format!("\"{test}\"")))?;
    let number = |index: usize| line.split(',').nth(index)?.trim_matches('"').parse::<f64>().ok();
    Some((number(1).filter(|per_s| *per_s > 0.0)?, number(4)? * 1000.0, number(6)? * 1000.0))
}

/// redis-cli; with `keys` it is given so many, under the names that redis-benchmark uses.
fn cli(socket: &Path, arguments: &[&str], keys: Option<u32>) -> Result<String, Box<dyn Error>> {
    let mut command = Command::new("redis-cli");
    command.arg("-s").arg(socket).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.stdin(Stdio::piped()).spawn().map_err(|error| format!("redis-cli: {error}"))?;
    if let Some(mut input) = child.stdin.take()
        && let Some(keys) = keys
    {
        let mut state = 6_u64;
        for key in 0..keys {
            let mut value = String::with_capacity(VALUE_BYTES as usize);
            while value.len() < VALUE_BYTES as usize {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                value += &format!("{state:016x}");
            }
            let key = format!("key:{key:012}");
            write!(input, "*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n{value}\r\n", key.len(), value.len())?;
        }
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        return Err(format!(
            "redis-cli {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        )
        .into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_redis_benchmark_says_is_understood() {
        let text = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\"p95_latency_ms\",\"p99_latency_ms\",\"max_latency_ms\"\n\
            \"SET\",\"50000.00\",\"0.3\",\"0.1\",\"0.25\",\"0.4\",\"0.5\",\"2\"\n\"GET\",\"0.00\",\"0\",\"0\",\"0\",\"0\",\"0\",\"0\"\n";
        assert_eq!(numbers(text, "SET"), Some((50000.0, 250.0, 500.0)));
        assert_eq!(
            (numbers(text, "GET"), numbers(text, "INCR"), numbers("\"SET\"", "SET")),
            (None, None, None)
        );
    }
}
