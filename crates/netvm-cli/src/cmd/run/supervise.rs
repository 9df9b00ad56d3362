//! Waiting for the program of a run, and for what it leaves in the background.

use netvm::runfile::RunFile;
use netvm_sys::descendants::{Descendants, has_ended};
use netvm_sys::signal::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, Signals};
use netvm_sys::stat::Stat;
use std::cell::Cell;
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::size::Size;

/// Between two looks at what the processes of the run have to say.
const LOOK: Duration = Duration::from_secs(1);
/// While processes in the background are waited for: some that use far memory may be nobody's children.
const LOOK_AT_REST: Duration = Duration::from_millis(500);
/// Those that end with the program are no background.
const GRACE: Duration = Duration::from_millis(20);

/// What ends the waiting for processes in the background.
const ENDING: [i32; 4] = [SIGTERM, SIGHUP, SIGINT, SIGQUIT];

pub struct Supervisor<'a> {
    run: &'a Arc<RunFile>,
    signals: &'a Signals,
    descendants: Descendants,
    told_stuck: Cell<bool>,
    told_no_room: Cell<bool>,
}

/// How the program has ended.
pub struct Ended {
    pub status: ExitStatus,
    /// What it was called then.
    name: Option<String>,
    /// Whether the preloaded library was in it all the time.
    pub preloaded: bool,
}

impl<'a> Supervisor<'a> {
    /// Before the program is started, and after the lenders.
    pub fn new(run: &'a Arc<RunFile>, signals: &'a Signals) -> Result<Self, String> {
        let descendants = Descendants::follow()
            .map_err(|error| format!("cannot follow the processes of the program: {error}"))?;
        Ok(Self { run, signals, descendants, told_stuck: Cell::new(false), told_no_room: Cell::new(false) })
    }

    /// Hands signals on until the program has ended.
    pub fn wait_for_program(&self, child: &mut Child) -> Result<Ended, String> {
        let pid = child.id();
        let mut looked = Instant::now();
        loop {
            if has_ended(pid) {
                let name = Stat::of(pid).map(|stat| stat.name);
                let status = child.wait().map_err(|error| format!("cannot wait for the program: {error}"))?;
                // Whom a signal has ended cannot say that it ends.
                let known = name.as_deref().filter(|_| status.code().is_some());
                let preloaded = self.run.was_preloaded(pid, known);
                return Ok(Ended { status, name, preloaded });
            }
            // However many signals come.
            if looked.elapsed() >= LOOK {
                self.run.reap_all();
                self.tell_of_trouble();
                looked = Instant::now();
            }
            match self.signals.wait_from_within(LOOK.saturating_sub(looked.elapsed())) {
                Some(taken) if taken.number == SIGCHLD => self.descendants.reap(Some(pid)),
                // What a terminal sends, the program has got too: it is in the same process group.
                Some(taken) if !taken.from_kernel => {
                    // It may have ended in this moment.
                    let _ = netvm_sys::signal::send(pid, taken.number);
                }
                _ => {}
            }
        }
    }

    /// Processes that the program left in the background still need the run's folder and lender, or may soon.
    pub fn wait_for_the_rest(&self) {
        self.tell_of_trouble();
        if self.rest() == 0 {
            return;
        }
        std::thread::sleep(GRACE);
        match self.rest() {
            0 => return,
            count => tell!("netvm: waiting for {count} background process(es) of this run"),
        }
        let until = self.signals.descriptor();
        while self.rest() > 0 {
            let mut fds: Vec<_> = until.iter().map(netvm_sys::thread::readable).collect();
            match netvm_sys::thread::poll(&mut fds, Some(LOOK_AT_REST)) {
                Ok(0) | Err(_) => self.tell_of_trouble(),
                // Told to stop: their memory goes with the lender.
                Ok(_) if ENDING.contains(&self.signals.wait()) => return,
                Ok(_) => {}
            }
        }
    }

    /// Processes of the run that are there, the program's descendants and others that use far memory.
    fn rest(&self) -> usize {
        self.descendants.reap(None);
        self.run.reap_all();
        let mut pids = self.descendants.pids();
        pids.extend(self.run.pids());
        pids.sort_unstable();
        pids.dedup();
        pids.len()
    }

    /// Says once what has gone wrong, as soon as it is known.
    fn tell_of_trouble(&self) {
        self.tell_of_stuck();
        self.tell_of_no_room();
    }

    /// Says once that a process has asked for more addresses than are left.
    fn tell_of_no_room(&self) {
        let Some(bytes) = self.run.no_room().filter(|_| !self.told_no_room.replace(true)) else { return };
        let area = Size(self.run.params().area_bytes);
        tell!(
            "netvm: the program wanted {} in one piece, more than is left of the {area} of addresses for far memory, and was told ENOMEM. If it cannot do \
             without, run it with a larger --area",
            Size(bytes),
        );
    }

    /// Says once that a process waits for memory that another does not give.
    fn tell_of_stuck(&self) {
        let Some(stuck) = self.run.stuck().filter(|_| !self.told_stuck.replace(true)) else { return };
        tell!(
            "netvm: {} has {} of the run's local memory and gives nothing back: is it stopped? Meanwhile {} gets little",
            named(stuck.holder),
            Size(stuck.frames * 4096),
            named(stuck.pid),
        );
    }
}

/// What a process is called, if it has a number here.
fn named(pid: Option<u32>) -> String {
    let Some(pid) = pid else { return "a process of another PID name space".into() };
    match Stat::of(pid) {
        Some(stat) => format!("process {pid} ({})", stat.name),
        None => format!("process {pid}"),
    }
}

impl Ended {
    /// Says that the program was not on far memory, if so.
    pub fn show_local(&self) {
        let Some(name) = self.name.as_ref().filter(|_| !self.preloaded) else { return };
        tell!(
            "netvm: {name} ran without the preloaded library, so its memory was local: it is statically linked, or was started without LD_PRELOAD and \
             NETVM_RUN in its environment"
        );
    }
}
