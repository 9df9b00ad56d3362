//! An installation below the target folder, and programs built against it as its users would.

#[path = "../../../../xtask/src/install.rs"]
#[allow(dead_code)]
pub mod install;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Far more than any of the programs needs.
const LIMIT: Duration = Duration::from_secs(120);

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

pub fn source() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

pub fn header() -> String {
    std::fs::read_to_string(source().join("include/netvm.h")).unwrap()
}

/// The static library that cargo has built for these tests, beside them.
pub fn archive() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let archives = here.ancestors().skip(1).take(2).flat_map(|folder| folder.read_dir().unwrap());
    let archives = archives.map(|entry| entry.unwrap().path()).filter(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libnetvm_c") && name.ends_with(".a")
    });
    let newest = archives.max_by_key(|path| path.metadata().unwrap().modified().unwrap());
    newest.expect("libnetvm_c.a is not beside the tests")
}

pub struct Installed {
    pub place: install::Place,
}

/// One for all tests of this process.
pub fn installed() -> &'static Installed {
    static INSTALLED: OnceLock<Installed> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        // What earlier runs have left: nothing here is dropped when the tests end.
        for entry in folder.read_dir().unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            let owner = name.strip_prefix("netvm-c-").and_then(|process| process.parse::<u32>().ok());
            if owner.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
                std::fs::remove_dir_all(entry.path()).unwrap();
            }
        }
        let destdir = folder.join(format!("netvm-c-{}", std::process::id()));
        let place = install::Place { destdir, prefix: "/opt/netvm".into(), libdir: "lib64".to_owned() };
        install::library(&root(), &archive(), env!("CARGO_PKG_VERSION"), &place).unwrap();
        Installed { place }
    })
}

impl Installed {
    /// What pkg-config says; `None` when there is none.
    pub fn flags(&self, arguments: &[&str]) -> Option<Vec<String>> {
        let mut command = Command::new("pkg-config");
        command.args(arguments).arg("netvm").env("PKG_CONFIG_SYSROOT_DIR", &self.place.destdir);
        command.env("PKG_CONFIG_LIBDIR", self.place.libraries().join("pkgconfig"));
        let output = match command.output() {
            Ok(output) => output,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                println!("skipped (pkg-config is not installed)");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(String::from_utf8(output.stdout).unwrap().split_whitespace().map(str::to_owned).collect())
    }

    /// Builds `source`; `None` when there is no pkg-config.
    pub fn build(&self, source: &Path, name: &str, flags: &[&str]) -> Option<PathBuf> {
        let program = self.place.destdir.join(name);
        let mut command = Command::new("cc");
        command.args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"]);
        command.arg(&program).arg(source).args(flags).args(self.flags(&["--cflags", "--libs"])?);
        command.args(["-lm", "-pthread"]);
        let output = command.output().expect("these tests need a C compiler named cc");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        Some(program)
    }

    /// A program to be run with the installed library.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", self.place.libraries());
        command.env("ASAN_OPTIONS", "detect_leaks=1:abort_on_error=0");
        command.env("UBSAN_OPTIONS", "print_stacktrace=1:halt_on_error=1");
        command
    }
}

/// Ends with the test, whatever happens.
pub struct Running(pub Child);

impl Running {
    pub fn start(command: &mut Command) -> Self {
        let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null());
        Self(piped.spawn().unwrap())
    }

    /// The first line that it prints.
    pub fn line(&mut self) -> (String, BufReader<std::process::ChildStdout>) {
        let mut out = BufReader::new(self.0.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        if line.is_empty() {
            let mut error = String::new();
            self.0.stderr.take().unwrap().read_to_string(&mut error).unwrap();
            panic!("nothing was printed; {error}");
        }
        (line, out)
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Output {
        let (out, error) = (self.0.stdout.take(), self.0.stderr.take());
        let reader = |pipe: Option<Box<dyn Read + Send>>| {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                if let Some(mut pipe) = pipe {
                    pipe.read_to_end(&mut bytes).unwrap();
                }
                bytes
            })
        };
        let out = reader(out.map(|out| Box::new(out) as _));
        let error = reader(error.map(|error| Box::new(error) as _));
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > LIMIT {
                self.0.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Output { status, stdout: out.join().unwrap(), stderr: error.join().unwrap() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Its standard output, when it has succeeded without a word to standard error but of what it has skipped, which is passed on.
pub fn succeeded(what: &str, output: &Output) -> String {
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let (skipped, error): (Vec<&str>, Vec<&str>) =
        error.lines().partition(|line| line.contains(": skipped ("));
    skipped.iter().for_each(|line| println!("{line}"));
    assert!(output.status.success() && error.is_empty(), "{what}: {}\n{out}\n{error:?}", output.status);
    out.into_owned()
}
