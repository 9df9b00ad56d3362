//! The commands.

pub mod bench;
pub mod completions;
pub mod demo;
pub mod device;
pub mod doctor;
mod explain;
pub mod lend;
pub mod man;
pub mod metrics;
pub mod mount;
pub mod nbd;
pub mod recv;
pub mod run;
pub mod secret;
pub mod send;
mod slabs;
pub mod status;
pub mod swap;
pub mod top;
pub mod ublk;
mod volume;

/// What a command returns: the process's exit code, or a sentence for standard error (exit code 125).
pub type Outcome<T = std::process::ExitCode> = Result<T, Box<dyn std::error::Error>>;

/// What tells a server to end, as often as one of these signals comes.
fn stop_on(signals: netvm_sys::signal::Signals) -> netvm::Result<netvm::lender::StopFlag> {
    let stop = netvm::lender::StopFlag::new()?;
    let flag = stop.clone();
    std::thread::spawn(move || {
        loop {
            signals.wait();
            flag.stop();
        }
    });
    Ok(stop)
}
