//! Dialogues with several peers in one thread, each waiting for its own. There are no threads in it and nothing that is shared, as it runs in the
//! handlers of fork(2), too.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// How a dialogue waits; one for each.
#[derive(Default)]
pub(crate) struct Wait(Cell<State>);

#[derive(Default)]
enum State {
    #[default]
    Running,
    Waiting(Want),
    /// Whether there is something to do, and not just its time over.
    Over(io::Result<bool>),
}

#[derive(Clone, Copy)]
struct Want {
    fd: RawFd,
    events: i16,
    until: Instant,
}

impl Wait {
    /// Until something of `events` is so (or the descriptor has failed); false when `timeout` passed first. Without a descriptor it always does.
    pub(crate) async fn ready(
        &self,
        fd: Option<BorrowedFd<'_>>,
        events: i16,
        timeout: Duration,
    ) -> io::Result<bool> {
        let until = Instant::now() + timeout;
        self.0.set(State::Waiting(Want { fd: fd.map_or(-1, |fd| fd.as_raw_fd()), events, until }));
        std::future::poll_fn(|_| match self.0.take() {
            State::Over(result) => Poll::Ready(result),
            waiting => {
                self.0.set(waiting);
                Poll::Pending
            }
        })
        .await
    }

    fn want(&self) -> Option<Want> {
        let state = self.0.take();
        let want = if let State::Waiting(want) = &state { Some(*want) } else { None };
        self.0.set(state);
        want
    }
}

/// Does all of `dialogues`, which wait by `waits` and by nothing else: one each, in this order.
pub(crate) fn together<F: Future>(waits: &[Wait], dialogues: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<Option<Pin<Box<F>>>> =
        dialogues.into_iter().map(|one| Some(Box::pin(one))).collect();
    assert!(running.len() <= waits.len(), "each waits for itself");
    let mut results: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    let mut context = Context::from_waker(Waker::noop());
    loop {
        for ((one, result), wait) in running.iter_mut().zip(&mut results).zip(waits) {
            if let Some(dialogue) = one
                && wait.want().is_none()
                && let Poll::Ready(value) = dialogue.as_mut().poll(&mut context)
            {
                (*one, *result) = (None, Some(value));
            }
        }
        if running.iter().all(Option::is_none) {
            return results.into_iter().flatten().collect();
        }
        wait_for_one(waits);
    }
}

/// Does one alone.
pub(crate) fn alone<T>(dialogue: impl AsyncFnOnce(&Wait) -> T) -> T {
    let waits = [Wait::default()];
    together(&waits, [dialogue(&waits[0])]).remove(0)
}

/// Until one of them has something to do.
fn wait_for_one(waits: &[Wait]) {
    let waiting = || waits.iter().filter_map(|wait| Some((wait, wait.want()?)));
    let mut fds: Vec<_> =
        waiting().map(|(_, Want { fd, events, .. })| libc::pollfd { fd, events, revents: 0 }).collect();
    let Some(until) = waiting().map(|(_, want)| want.until).min() else {
        unreachable!("a dialogue waits for something else");
    };
    let left = until.saturating_duration_since(Instant::now());
    let failed = netvm_sys::thread::poll(&mut fds, Some(left)).err();
    let now = Instant::now();
    for ((wait, want), fd) in waiting().zip(&fds) {
        let over = match &failed {
            Some(error) => Err(error.kind().into()),
            // What has come counts, however late it is looked at.
            None if fd.revents != 0 => Ok(true),
            None if now >= want.until => Ok(false),
            None => continue,
        };
        wait.0.set(State::Over(over));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Incoming, Outgoing, Stream};
    use std::os::fd::AsFd;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn one_waits_while_others_go_on() {
        let pairs: Vec<_> = (0..4).map(|_| Stream::pair().unwrap()).collect();
        let waits: [Wait; 4] = Default::default();
        let order = Cell::new(String::new());
        let note = |text: &str| order.set(order.take() + text);
        // Each passes on what the one before it has sent; the first waits in vain, and then begins.
        let dialogues = (0..4).map(|index| {
            let (waits, pairs, note) = (&waits, &pairs, &note);
            async move {
                let from = pairs[index].1.as_fd();
                let came = waits[index].ready(Some(from), libc::POLLIN, 30 * MS * (1 + index as u32)).await;
                note(&format!("{index}{} ", if came.unwrap() { "came" } else { "late" }));
                if let Some((to, _)) = pairs.get(index + 1) {
                    let mut pieces = Outgoing::new();
                    pieces.bytes(b"x");
                    to.send(&pieces).unwrap();
                }
                index
            }
        });
        let since = Instant::now();
        assert_eq!(together(&waits, dialogues), [0, 1, 2, 3]);
        assert_eq!(order.take(), "0late 1came 2came 3came ");
        assert!(since.elapsed() >= 30 * MS);
        let mut byte = [0];
        let mut pieces = Incoming::new();
        pieces.bytes(&mut byte);
        assert_eq!(pairs[3].1.receive(&mut pieces).unwrap(), 1);
    }

    #[test]
    fn without_a_descriptor_only_time_passes() {
        let since = Instant::now();
        assert!(!alone(async |wait| wait.ready(None, libc::POLLIN, 20 * MS).await).unwrap());
        assert!(since.elapsed() >= 20 * MS);
    }
}
