//! `cargo xtask guest`: tests that need a kernel of their own, in emulated machines ([design](../../../docs/design/guest.md)).

mod debug;
mod initramfs;
mod kernel;
mod machine;
mod packages;
mod script;
mod tools;

use initramfs::Initramfs;
use kernel::{Architecture, Kernel};
use machine::{End, Machine, Outcome, Wire};
use packages::Packages;
use script::Script;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tools::Result;

/// Programs that the harness and its tests need, and the packages that have them.
pub const PROGRAMS: [(&str, &str); 13] = [
    ("/usr/bin/qemu-system-x86_64", "qemu-system-x86"),
    ("/usr/bin/qemu-system-aarch64", "qemu-system-arm"),
    ("/usr/sbin/depmod", "kmod"),
    ("/usr/bin/make", "make"),
    ("/usr/bin/xz", "xz-utils"),
    ("/usr/bin/zstd", "zstd"),
    ("/usr/bin/aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
    ("/usr/aarch64-linux-gnu/lib/libc.a", "libc6-dev-arm64-cross"),
    ("/usr/bin/sparse", "sparse"),
    ("/usr/sbin/nbd-client", "nbd-client"),
    ("/usr/sbin/mkfs.ext4", "e2fsprogs"),
    ("/usr/bin/nbdkit", "nbdkit"),
    ("/usr/bin/nbdfuse", "libnbd-bin"),
];
/// What every guest needs for its disk and its network, as far as it is not built in.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_blk", "virtio_net"];
/// The package whose checkpatch looks at modules.
const CHECKPATCH: &str = "linux-source-6.1";
/// More failures than this are no accident.
const AGAIN_MAX: usize = 2;
/// Begins the name of a folder of what a run has built, before its process.
const BUILT: &str = "built-";
/// Guests that run at a time, and one more that waits mostly. A pair counts as one of them.
const AT_A_TIME: usize = 2;

/// Connections of two guests so far.
static WIRES: AtomicU32 = AtomicU32::new(0);

/// What `cargo xtask guest` was asked for.
#[derive(Debug, Default)]
struct Wanted {
    kernels: Vec<String>,
    tests: Vec<String>,
}

/// How a test went.
enum Verdict {
    Passed(String),
    Failed(String),
    /// Something that it needs cannot be had.
    Skipped(String),
}

impl Verdict {
    fn print(&self, name: &str) {
        match self {
            Self::Passed(how) => println!("{name} ... ok ({how})"),
            Self::Failed(why) => println!("{name} ... FAILED: {why}"),
            Self::Skipped(why) => println!("{name} ... skipped ({why})"),
        }
    }
}

/// Gets all that the tests in `guest/tests` need but the programs, or what those need, and benches of `guest/benches`, that are named.
///
/// # Errors
/// What was asked for and cannot be. Of what cannot be had the tests that need it say so.
pub fn ready(root: &Path, target: &Path, arguments: impl Iterator<Item = String>) -> Result<Suite> {
    let wanted = parse(arguments)?;
    let mut scripts = Vec::new();
    let tests = root.join("guest/tests");
    if wanted.tests.is_empty() {
        for path in
            tools::files(&tests)?.iter().filter(|path| path.extension().is_some_and(|end| end == "sh"))
        {
            scripts.push(Script::read(path)?);
        }
    }
    for name in &wanted.tests {
        let folders = [&tests, &root.join("guest/benches")];
        let known = folders.map(|folder| folder.join(name).with_extension("sh"));
        let path = known.iter().find(|path| path.exists());
        scripts.push(Script::read(path.map_or(Path::new(name), PathBuf::as_path))?);
    }
    let mut jobs = Vec::new();
    for script in scripts.into_iter().map(Arc::new) {
        jobs.extend(wanted.kernels_of(&script).into_iter().map(|kernels| (Arc::clone(&script), kernels)));
    }
    // So that none of the long ones is left alone at the end.
    jobs.sort_by_key(|(script, _)| Reverse(script.limit));
    let build = wanted.kernels.iter().any(|kernels| kernels.split('+').any(|name| name == debug::NAME));
    let mut suite = Suite::new(root, target, build, jobs)?;
    suite.prepare()?;
    Ok(suite)
}

impl Wanted {
    /// What a script runs on: of what it names, what was asked for. A test that is asked for by name runs in any case on what was asked for; one of
    /// two guests has that as the second, which the first one serves.
    fn kernels_of(&self, script: &Script) -> Vec<String> {
        let named = script.kernels.iter();
        if self.kernels.is_empty() {
            return named.cloned().collect();
        }
        let mut of = Vec::new();
        for kernels in &self.kernels {
            let has = |named: &&String| *named == kernels || named.split('+').any(|name| name == kernels);
            let before = of.len();
            of.extend(named.clone().filter(has).cloned());
            if of.len() == before && !self.tests.is_empty() {
                // Alone it would wait for the other one until its limit.
                let first = script.kernels.first().and_then(|pair| pair.split_once('+'));
                of.push(match first.filter(|_| !kernels.contains('+')) {
                    Some((first, _)) => format!("{first}+{kernels}"),
                    None => kernels.clone(),
                });
            }
        }
        of.dedup();
        of
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Wanted> {
    let mut wanted = Wanted::default();
    while let Some(argument) = arguments.next() {
        if argument == "--kernel" {
            wanted.kernels.push(arguments.next().ok_or("--kernel needs the name of a kernel")?);
        } else if argument.starts_with('-') {
            return Err(format!("{argument} is not understood"));
        } else {
            wanted.tests.push(argument);
        }
    }
    Ok(wanted)
}

fn busybox(packages: &Packages, debian: &str) -> Result<PathBuf> {
    let package = format!("busybox-static:{debian}");
    let folder =
        packages.folder(&format!("busybox-{debian}"), |folder| packages.unpack(&[package], folder))?;
    Ok(folder.join("bin/busybox"))
}

/// The folder of the kernel's checker of style.
fn checkpatch(packages: &Packages) -> Result<PathBuf> {
    packages.folder("checkpatch", |folder| {
        packages.unpack(&[format!("{CHECKPATCH}:all")], folder)?;
        let sources = folder.join(format!("usr/src/{CHECKPATCH}.tar.xz"));
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(&sources).arg("-C").arg(folder).args(["--strip-components=2", "--wildcards"]);
        tools::run(tar.args([
            "*/scripts/checkpatch.pl",
            "*/scripts/spelling.txt",
            "*/scripts/const_structs.checkpatch",
        ]))?;
        fs::remove_dir_all(folder.join("usr"))
            .map_err(|error| format!("cannot remove {}: {error}", folder.display()))
    })
}

/// A script, and the kernels on which it runs.
type Job = (Arc<Script>, String);

/// Tests, and what they share.
pub struct Suite {
    jobs: Vec<Job>,
    /// What the kernel's checker of style says of our modules, if some are needed.
    style: Option<Verdict>,
    root: PathBuf,
    target: PathBuf,
    /// Where guests leave things, in a folder for each test that is emptied when it starts: another run may have others.
    work: PathBuf,
    /// What was built for this run, which goes with it.
    built: PathBuf,
    packages: Packages,
    /// Whether the debug kernel is built if it is not there; that it cannot be is an error then.
    build: bool,
    /// The programs are there.
    are_built: bool,
    /// Kernels that were asked for, or why they cannot be had.
    kernels: BTreeMap<&'static str, Result<Kernel>>,
    /// Modules of ours by kernel, or why they cannot be built.
    modules: BTreeMap<&'static str, Result<Vec<PathBuf>>>,
    busybox: BTreeMap<&'static str, Result<PathBuf>>,
}

impl Suite {
    fn new(root: &Path, target: &Path, build: bool, jobs: Vec<Job>) -> Result<Self> {
        let work = target.join("guest");
        tools::make_folder(&work)?;
        sweep(&work);
        let built = work.join(format!("{BUILT}{}", std::process::id()));
        tools::make_folder(&built)?;
        Ok(Self {
            jobs,
            style: None,
            root: root.to_owned(),
            target: target.to_owned(),
            work,
            built,
            packages: Packages::open()?,
            build,
            are_built: false,
            kernels: BTreeMap::new(),
            modules: BTreeMap::new(),
            busybox: BTreeMap::new(),
        })
    }

    fn prepare(&mut self) -> Result<()> {
        for (script, kernels) in self.jobs.clone() {
            for name in kernels.split('+') {
                self.prepare_kernel(name, !script.kmod.is_empty())?;
            }
        }
        if self.style.is_none() && self.jobs.iter().any(|(script, _)| !script.kmod.is_empty()) {
            self.style = Some(self.style());
        }
        Ok(())
    }

    /// Runs all of them; `are_built`: the programs have been, with other tests. Gives how many passed and failed.
    ///
    /// # Errors
    /// What keeps all of them from being run.
    pub fn run(mut self, are_built: bool) -> Result<(u64, u64)> {
        self.are_built = are_built;
        let started = Instant::now();
        // The network may be back that was away when they were made ready.
        self.kernels.retain(|_, kernel| kernel.is_ok());
        self.busybox.retain(|_, busybox| busybox.is_ok());
        if matches!(self.style, Some(Verdict::Skipped(_))) {
            self.style = None;
        }
        self.prepare()?;
        let style = self.style.take();
        style.iter().for_each(|style| style.print("guest style of kmod"));
        let jobs = std::mem::take(&mut self.jobs);
        let (waiting, working): (Vec<Job>, _) = jobs.into_iter().partition(|(script, _)| script.waits);
        let queues = [working, waiting].map(|jobs| Mutex::new(jobs.into_iter()));
        let suite = &self;
        let next = |queues: &[Mutex<std::vec::IntoIter<Job>>]| {
            queues.iter().find_map(|queue| queue.lock().unwrap_or_else(PoisonError::into_inner).next())
        };
        let verdicts = Mutex::new(Vec::from_iter(style));
        let failed = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for queues in [&queues[..]; AT_A_TIME].into_iter().chain([&queues[1..]]) {
                let (next, verdicts, failed) = (&next, &verdicts, &failed);
                scope.spawn(move || {
                    while let Some((script, kernels)) = next(queues) {
                        let verdict = suite.test(&script, &kernels).unwrap_or_else(Verdict::Failed);
                        verdict.print(&format!("guest {} on {kernels}", script.name()));
                        if matches!(verdict, Verdict::Failed(_)) {
                            failed.lock().unwrap_or_else(PoisonError::into_inner).push((script, kernels));
                        }
                        verdicts.lock().unwrap_or_else(PoisonError::into_inner).push(verdict);
                    }
                });
            }
        });
        let mut verdicts = verdicts.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Emulated machines have limits of time, too: what failed beside another guest may pass alone.
        let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        let again = if failed.len() <= AGAIN_MAX { &failed[..] } else { &[] };
        for (script, kernels) in again {
            let verdict = suite.test(script, kernels).unwrap_or_else(Verdict::Failed);
            verdict.print(&format!("guest {} on {kernels} again, alone", script.name()));
            if matches!(verdict, Verdict::Passed(_)) {
                verdicts.push(verdict);
                let index = verdicts.iter().position(|verdict| matches!(verdict, Verdict::Failed(_)));
                index.map(|index| verdicts.swap_remove(index));
            }
        }
        let (mut passed, mut failed, mut skipped) = (0, 0, 0);
        for verdict in verdicts {
            match verdict {
                Verdict::Passed(_) => passed += 1,
                Verdict::Failed(_) => failed += 1,
                Verdict::Skipped(_) => skipped += 1,
            }
        }
        println!(
            "guest: {passed} passed, {failed} failed, {skipped} skipped; {:.0} s",
            started.elapsed().as_secs_f64()
        );
        Ok((passed, failed))
    }

    /// Gets a kernel and what belongs to it, once.
    fn prepare_kernel(&mut self, name: &str, modules: bool) -> Result<()> {
        let known = kernel::KERNELS.iter().find(|(known, ..)| *known == name);
        let &(name, _, architecture) = known.ok_or_else(|| format!("there is no kernel {name}"))?;
        let (packages, config, build) = (&self.packages, self.root.join("guest/debug.config"), self.build);
        let kernel = self.kernels.entry(name).or_insert_with(|| Kernel::get(packages, name, &config, build));
        if let (debug::NAME, true, Err(error)) = (name, build, &kernel) {
            return Err(error.clone());
        }
        let debian = architecture.debian();
        self.busybox.entry(debian).or_insert_with(|| busybox(packages, debian));
        if let (true, Ok(kernel)) = (modules, kernel) {
            let (root, built) = (&self.root, &self.built);
            self.modules.entry(name).or_insert_with(|| {
                let mut files = kernel.build(&root.join("kmod"), built)?;
                if kernel.is_debug() {
                    files.extend(kernel.build(&root.join("guest/mistakes"), built)?);
                }
                Ok(files)
            });
        }
        Ok(())
    }

    /// The kernel's own checker of style must have nothing to say of `kmod/`.
    fn style(&self) -> Verdict {
        match checkpatch(&self.packages) {
            Err(error) => Verdict::Skipped(error.lines().next().unwrap_or_default().to_owned()),
            Ok(_) if tools::find("perl").is_none() => Verdict::Skipped("perl is not installed".to_owned()),
            Ok(folder) => {
                let mut checkpatch = Command::new("perl");
                checkpatch.arg(folder.join("checkpatch.pl")).args(["--no-tree", "--strict", "--terse", "-f"]);
                let sources = tools::files(&self.root.join("kmod")).unwrap_or_default();
                let sources = sources
                    .into_iter()
                    .filter(|file| file.extension().is_some_and(|end| end == "c" || end == "h"));
                match tools::run(checkpatch.args(sources)) {
                    Ok(()) => Verdict::Passed(format!("checkpatch of {CHECKPATCH}")),
                    Err(said) => Verdict::Failed(said),
                }
            }
        }
    }

    /// Runs a script in a guest, or in two that are connected ("6.1+6.12").
    fn test(&self, script: &Script, kernels: &str) -> Result<Verdict> {
        let folder = self.work.join(format!("{}-{kernels}", script.name()));
        let _ = fs::remove_dir_all(&folder);
        let names: Vec<&str> = kernels.split('+').collect();
        if names.len() > 2 {
            return Err("more than two guests cannot be connected".to_owned());
        }
        let of = |name: &&str| self.kernels.get(name)?.as_ref().ok().map(Kernel::slowness);
        let slowness = names.iter().filter_map(of).max().unwrap_or(1);
        let mut machines = Vec::new();
        // Not in the folder: paths of unix sockets must be short.
        let wire = Removed(std::env::temp_dir().join(format!(
            "netvm-wire-{}-{}",
            std::process::id(),
            WIRES.fetch_add(1, Ordering::Relaxed)
        )));
        let _ = fs::remove_file(&wire.0);
        for (index, name) in names.iter().enumerate() {
            let Some(Ok(kernel)) = self.kernels.get(name) else {
                return Ok(Verdict::Skipped(match self.kernels.get(name) {
                    Some(Err(error)) => error.lines().next().unwrap_or_default().to_owned(),
                    _ => "no such kernel".to_owned(),
                }));
            };
            if let Some(missing) = self.missing(script, kernel) {
                return Ok(Verdict::Skipped(missing));
            }
            let place = folder.join(if index == 0 { "first" } else { "second" });
            tools::make_folder(&place)?;
            let initramfs = place.join("initramfs");
            tools::write(&initramfs, self.initramfs(script, kernel, (index, names.len()), slowness)?)?;
            let socket = wire.0.clone();
            let wire_of =
                if names.len() == 2 { Wire::Pair { socket, listens: index == 0 } } else { Wire::None };
            let (packed, counted, checked) = (script.packed, script.counted, script.checked);
            let (memory_mib, limit) = (script.memory_mib[index], script.limit);
            machines.push((
                Machine {
                    kernel,
                    packed,
                    counted,
                    checked,
                    host: script.host,
                    memory_mib,
                    initramfs: &initramfs,
                    wire: wire_of,
                    folder: place,
                    limit,
                    slowness,
                }
                .start()?,
                initramfs,
            ));
            if let (0, 2) = (index, names.len()) {
                wait_for(&wire.0)?;
            }
        }
        // The first one's end is awaited last: it serves the other one.
        let mut outcomes = Vec::new();
        while let Some((machine, initramfs)) = machines.pop() {
            let outcome = machine.finish()?;
            let _ = fs::remove_file(initramfs);
            let place = folder.join(if machines.is_empty() { "first" } else { "second" });
            if !script.ends.is(&outcome.end) {
                return Ok(Verdict::Failed(describe(&outcome, &place)));
            }
            outcomes.push(outcome);
        }
        let check = script.path.with_extension("check");
        if check.exists() {
            tools::run(
                Command::new("sh")
                    .arg("-eu")
                    .arg(fs::canonicalize(&check).unwrap_or(check))
                    .current_dir(&folder),
            )?;
        }
        let seconds = |time: Option<Duration>| {
            time.map_or_else(|| "never".to_owned(), |time| format!("{:.1} s", time.as_secs_f64()))
        };
        let boot = outcomes.iter().filter_map(|outcome| outcome.boot).max();
        let all = outcomes.iter().map(|outcome| outcome.elapsed).max();
        Ok(Verdict::Passed(format!("script started after {}, all {}", seconds(boot), seconds(all))))
    }

    /// Why a script cannot run on a kernel here.
    fn missing(&self, script: &Script, kernel: &Kernel) -> Option<String> {
        let emulator = format!("qemu-system-{}", kernel.architecture.machine());
        if tools::find(&emulator).is_none() {
            return Some(format!("{emulator} is not installed"));
        }
        if let Some(Err(error)) = self.busybox.get(kernel.architecture.debian()) {
            return Some(error.lines().next().unwrap_or_default().to_owned());
        }
        let ours = script.programs.len() + script.files.len() + script.examples.len();
        if ours > 0 && !kernel.architecture.is_ours() {
            return Some("the programs of this machine do not run on that one".to_owned());
        }
        if let Some(program) =
            script.programs.iter().find(|name| *name != "netvm" && tools::find(name).is_none())
        {
            return Some(format!("{program} is not installed"));
        }
        if let Some(file) = script.files.iter().find(|file| !file.is_file()) {
            return Some(format!("there is no {}", file.display()));
        }
        let compiler = kernel.architecture.compiler();
        let compiles = !script.compiles.is_empty() || !script.kmod.is_empty();
        let builds = if script.kmod.is_empty() { None } else { Some("make") };
        let tools = builds.into_iter().chain(compiles.then_some(compiler.as_str()));
        if let Some(tool) = tools.into_iter().find(|tool| tools::find(tool).is_none()) {
            return Some(format!("{tool} is not installed"));
        }
        // It answers with a path if it has the file.
        let library =
            || tools::output(Command::new(&compiler).arg("-print-file-name=libc.a")).unwrap_or_default();
        let static_programs = script.compiles.is_empty() || library().contains('/');
        (!static_programs).then(|| format!("{compiler} has no static C library"))
    }

    /// The root of a guest.
    fn initramfs(
        &self,
        script: &Script,
        kernel: &Kernel,
        (index, count): (usize, usize),
        slowness: u32,
    ) -> Result<Vec<u8>> {
        let mut root = Initramfs::new();
        root.add_file("/init", &self.root.join("guest/init"), true)?;
        root.add_file("/test/script", &script.path, true)?;
        root.add_file("/test/functions", &self.root.join("guest/functions"), false)?;
        if let Some(Ok(busybox)) = self.busybox.get(kernel.architecture.debian()) {
            root.add_file("/bin/busybox", busybox, true)?;
        }
        let role = if index == 0 { "first" } else { "second" };
        let mut about = format!("ROLE={role}\nGUESTS={count}\nKERNEL={}\nSLOWNESS={slowness}\n", kernel.name);
        if script.host {
            let packages = ["-p", "netvm-cli", "-p", "netvm-preload"];
            let profile = if script.checked {
                self.cargo_build(&packages)?;
                "tested"
            } else {
                // It measures: with what people use.
                tools::run(crate::cargo(&["build", "--quiet", "--release"]).args(packages))?;
                "release"
            };
            about += &format!("BUILT='{}'\n", self.target.join(profile).display());
        }
        root.add("/test/environment", about.as_bytes(), false);
        let wanted: Vec<&str> =
            MODULES.into_iter().chain(script.modules.iter().map(String::as_str)).collect();
        let mut order = String::new();
        for file in kernel.modules(&wanted)? {
            let name = tools::name(&file);
            let plain = name.trim_end_matches(".xz");
            order.push_str(&format!("/modules/{plain}\n"));
            if plain == name {
                root.add_file(&format!("/modules/{plain}"), &file, false)?;
            } else {
                root.add(
                    &format!("/modules/{plain}"),
                    &tools::bytes(Command::new("xz").arg("-dc").arg(&file))?,
                    false,
                );
            }
        }
        root.add("/modules/order", order.as_bytes(), false);
        for name in &script.kmod {
            let built = self
                .modules
                .get(kernel.name)
                .ok_or("the module was not built")?
                .as_ref()
                .map_err(Clone::clone)?;
            let file = built.iter().find(|file| tools::name(file) == format!("{name}.ko"));
            root.add_file(
                &format!("/test/{name}.ko"),
                file.ok_or_else(|| format!("kmod has no {name}"))?,
                false,
            )?;
        }
        for name in &script.compiles {
            let source = script.path.with_file_name(format!("{name}.c"));
            root.add_file(&format!("/bin/{name}"), &self.compile(&source, kernel.architecture)?, true)?;
        }
        for name in &script.programs {
            root.add_program(&if name == "netvm" {
                self.netvm()?
            } else {
                tools::find(name).unwrap_or_default()
            })?;
        }
        for file in &script.files {
            root.add_linked(&file.to_string_lossy(), file)?;
        }
        for name in &script.examples {
            root.add_program(&self.build(&["-p", "netvm", "--example", name], &format!("examples/{name}"))?)?;
        }
        Ok(root.finish())
    }

    fn compile(&self, source: &Path, architecture: Architecture) -> Result<PathBuf> {
        let place = self.built.join(format!("{}-{:?}", architecture.debian(), std::thread::current().id()));
        tools::make_folder(&place)?;
        let program = place.join(source.file_stem().unwrap_or_default());
        let mut compiler = Command::new(architecture.compiler());
        compiler.args(["-static", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(source);
        tools::run(&mut compiler)?;
        Ok(program)
    }

    fn netvm(&self) -> Result<PathBuf> {
        self.build(&["-p", "netvm-cli"], "netvm")
    }

    fn cargo_build(&self, what: &[&str]) -> Result<()> {
        if self.are_built {
            return Ok(());
        }
        tools::run(crate::cargo(&["build", "--quiet", "--profile", "tested"]).args(what))
    }

    /// A program as tests build it, without what a debugger needs.
    fn build(&self, what: &[&str], file: &str) -> Result<PathBuf> {
        let place = self.built.join(format!("programs-{:?}", std::thread::current().id()));
        tools::make_folder(&place)?;
        self.cargo_build(what)?;
        let built = self.target.join("tested").join(file);
        let program = place.join(tools::name(&built));
        tools::run(Command::new("strip").arg("-o").arg(&program).arg(built))?;
        Ok(program)
    }
}

/// Is not there any more when this is dropped.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Drop for Suite {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.built);
    }
}

/// Removes what runs have built that were killed.
fn sweep(work: &Path) {
    let left = fs::read_dir(work).into_iter().flatten().flatten().filter(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.strip_prefix(BUILT).is_some_and(|pid| !Path::new("/proc").join(pid).exists())
    });
    for entry in left {
        let _ = fs::remove_dir_all(entry.path());
    }
}

/// Until the guest that is connected to listens.
fn wait_for(socket: &Path) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(20);
    while !socket.exists() {
        if Instant::now() > end {
            return Err(format!("QEMU does not listen at {}", socket.display()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// How a guest ended that should have ended otherwise, with the end of what it said.
fn describe(outcome: &Outcome, folder: &Path) -> String {
    let how = match &outcome.end {
        End::Status(status) => format!("the script ended with status {status}"),
        End::Complaint(line) => format!("the kernel complained: {line}"),
        End::Limit => "it took too long".to_owned(),
        End::Lost => "it stopped before the script ended".to_owned(),
    };
    let console = tools::read(&folder.join("console")).unwrap_or_default();
    let lines: Vec<&str> = console.lines().collect();
    let last = lines[lines.len().saturating_sub(60)..].join("\n");
    let after = outcome.elapsed.as_secs_f64();
    format!("{how} after {after:.1} s; the end of {}:\n{last}", folder.join("console").display())
}

#[cfg(test)]
mod tests {
    use super::{Script, parse};
    use std::path::Path;

    #[test]
    fn a_script_runs_on_what_it_names_unless_more_is_asked_for() {
        let wanted = |arguments: &str| parse(arguments.split_ascii_whitespace().map(str::to_owned)).unwrap();
        let script = |kernels: &str| Script {
            kernels: kernels.split(' ').map(str::to_owned).collect(),
            ..Script::read(Path::new("/dev/null")).unwrap()
        };
        let (one, two) = (script("6.1 debug"), script("6.1+6.12 6.1+debug"));
        assert_eq!(wanted("").kernels_of(&one), ["6.1", "debug"]);
        assert_eq!(wanted("--kernel debug").kernels_of(&one), ["debug"]);
        assert_eq!(wanted("--kernel debug").kernels_of(&two), ["6.1+debug"]);
        assert_eq!(wanted("--kernel 6.12-arm64").kernels_of(&one), [""; 0]);
        assert_eq!(wanted("--kernel 6.12-arm64 one").kernels_of(&one), ["6.12-arm64"]);
        assert_eq!(wanted("--kernel 6.12+debug two").kernels_of(&two), ["6.12+debug"]);
        let (two, both) = (script("6.12+6.1 6.1+6.1"), script("6.1 6.1+6.12"));
        assert_eq!(
            wanted("--kernel debug two").kernels_of(&two),
            ["6.12+debug"],
            "a test of two is never alone"
        );
        assert_eq!(wanted("--kernel debug both").kernels_of(&both), ["debug"]);
        assert_eq!(wanted("--kernel debug+6.1 two").kernels_of(&two), ["debug+6.1"]);
        parse(["--kernel".to_owned()].into_iter()).unwrap_err();
    }
}
