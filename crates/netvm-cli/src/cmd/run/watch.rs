//! What `--trace` and `--report` show: a thread that looks at the run's counters while it goes on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use netvm::runfile::RunFile;

use super::report::Report;
use super::trace::Trace;
use crate::runs::Look;

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// Looks until it is dropped.
pub struct Watch {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Begins to write what is asked for.
    ///
    /// # Errors
    /// When a file cannot be created.
    pub fn start(
        run: &Arc<RunFile>,
        program: &str,
        trace: Option<&Path>,
        report: Option<&Path>,
    ) -> Result<Self, String> {
        if trace.is_none() && report.is_none() {
            return Ok(Self { end: None, thread: None });
        }
        let mut trace = trace.map(|path| Trace::create(path, program)).transpose()?;
        // Now rather than after hours: whether there is a place for it.
        let mut report = report
            .map(|path| {
                let report = Report::new(program);
                report.write(path).map_err(|error| error.to_string())?;
                Ok::<_, String>((report, PathBuf::from(path)))
            })
            .transpose()?;
        let (end, ended) = channel::<()>();
        let run = Arc::clone(run);
        let body = move || {
            let start = Instant::now();
            loop {
                let is_last = ended.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout);
                let look = Look::at(&run);
                if let Some(open) = &mut trace
                    && let Err(error) = open.add(look.at - start, &look, &run.each_process())
                {
                    tell!("netvm: the trace ends here: {error}");
                    trace = None;
                }
                if let Some((report, _)) = &mut report {
                    report.add(look.at - start, look, &run.each_detail());
                }
                if is_last {
                    break;
                }
            }
            if let Some(Err(error)) = trace.map(Trace::finish) {
                tell!("netvm: the trace is not complete: {error}");
            }
            if let Some((report, path)) = report
                && let Err(error) = report.write(&path)
            {
                tell!("netvm: {error}");
            }
        };
        let thread = std::thread::Builder::new().name("netvm-watch".to_owned()).spawn(body);
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
