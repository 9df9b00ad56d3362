//! Segments of other processes as files: a thread for each, which may wait for its peer.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use netvm_sys::epoll::EventFd;
use netvm_sys::shared::SharedSlice;

use crate::error::{Error, Result};
use crate::node::Node;
use crate::region::Region;

/// What a segment is asked for. The memory is the segment's until the answer.
pub(super) enum Job {
    Read { token: u64, offset: u64, local: SharedSlice },
    Write { token: u64, offset: u64, local: SharedSlice },
    Flush { token: u64 },
}

/// Segments, and what they have answered.
pub(super) struct Segments {
    jobs: Vec<Sender<Job>>,
    writable: Vec<bool>,
    /// Whose memory it is, if that is a process of this host that has to answer for it.
    exporters: Vec<Option<u32>>,
    answered: Receiver<(u64, Result<()>)>,
    answer: Sender<(u64, Result<()>)>,
    pub(super) event: Arc<EventFd>,
    /// They keep the connections.
    nodes: Vec<Arc<Node>>,
}

impl Segments {
    pub(super) fn new() -> Result<Self> {
        let (answer, answered) = channel();
        let event = EventFd::new().map_err(|error| Error::system("make an event descriptor", &error))?;
        Ok(Self {
            jobs: Vec::new(),
            writable: Vec::new(),
            exporters: Vec::new(),
            answered,
            answer,
            event: Arc::new(event),
            nodes: Vec::new(),
        })
    }

    /// Starts a thread for a segment; returns its number.
    pub(super) fn add(&mut self, node: Arc<Node>, region: Region, writable: bool) -> Result<u32> {
        let (sender, jobs) = channel();
        let (answer, event) = (self.answer.clone(), self.event.clone());
        // What is mapped here is there without its process.
        let exporter = if region.link() == "shm" { None } else { region.peer_process() };
        let thread = std::thread::Builder::new().name("netvm-segment".to_owned());
        thread
            .spawn(move || {
                for job in jobs {
                    let (token, result) = match job {
                        Job::Read { token, offset, local } => (token, region.read_shared(offset, &[local])),
                        Job::Write { token, offset, local } => (token, region.write_shared(offset, &[local])),
                        Job::Flush { token } => (token, region.flush()),
                    };
                    if answer.send((token, result)).is_err() {
                        return;
                    }
                    event.signal();
                }
            })
            .map_err(|error| Error::system("start a thread", &error))?;
        self.jobs.push(sender);
        self.nodes.push(node);
        self.writable.push(writable);
        self.exporters.push(exporter);
        Ok(self.jobs.len() as u32 - 1)
    }

    pub(super) fn is_writable(&self, segment: u32) -> bool {
        self.writable.get(segment as usize).is_some_and(|&writable| writable)
    }

    /// Whether a thread belongs to the process that has to answer for a segment: it could wait for itself.
    pub(super) fn is_exporter(&self, segment: u32, thread: u32) -> bool {
        self.exporters.get(segment as usize).copied().flatten().is_some_and(|exporter| {
            let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
            let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
            process.is_some_and(|process| process.trim().parse() == Ok(exporter))
        })
    }

    /// False when its thread has gone.
    pub(super) fn begin(&self, segment: u32, job: Job) -> bool {
        self.jobs.get(segment as usize).is_some_and(|jobs| jobs.send(job).is_ok())
    }

    pub(super) fn answers(&self) -> Vec<(u64, Result<()>)> {
        self.event.take();
        self.answered.try_iter().collect()
    }
}
