//! Listeners of a process that has no descriptor left for who connects.

use std::io;
use std::os::fd::AsFd;

use netvm_sys::epoll::{Epoll, Interest};

/// Listeners, by number, that could not accept. They are not watched until their owner looks after its peers again, so that who waits there
/// does not keep it awake.
#[derive(Debug, Default)]
pub(crate) struct Paused(Vec<usize>);

impl Paused {
    pub(crate) fn pause(&mut self, epoll: &Epoll, listener: &impl AsFd, index: usize) {
        if epoll.remove(listener.as_fd()).is_ok() {
            self.0.push(index);
        }
    }

    /// Watches them again, as the number `first_id` and theirs; a number without a listener is forgotten.
    pub(crate) fn resume<'a, L: AsFd + 'a>(
        &mut self,
        epoll: &Epoll,
        first_id: u64,
        listener: impl Fn(usize) -> Option<&'a L>,
    ) {
        let watch = |index: usize, listener: &L| -> io::Result<()> {
            let interest = Interest { readable: true, writable: false };
            epoll.add(listener.as_fd(), first_id + index as u64, interest)
        };
        self.0.retain(|&index| listener(index).is_some_and(|listener| watch(index, listener).is_err()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netvm_sys::net::Listener;
    use std::time::Duration;

    #[test]
    fn who_waits_is_told_of_when_it_is_watched_again_and_not_before() {
        let (epoll, mut paused, mut ready) = (Epoll::new().unwrap(), Paused::default(), Vec::new());
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        epoll.add(listener.as_fd(), 12, Interest { readable: true, writable: false }).unwrap();
        let _waits = std::net::TcpStream::connect(listener.address().to_string()).unwrap();
        epoll.wait(&mut ready, Some(Duration::from_secs(10))).unwrap();
        assert_eq!(ready.len(), 1);
        paused.pause(&epoll, &listener, 2);
        epoll.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert!(ready.is_empty(), "{ready:?}");
        paused.resume(&epoll, 10, |index| (index == 2).then_some(&listener));
        epoll.wait(&mut ready, Some(Duration::from_secs(10))).unwrap();
        assert_eq!((ready.len(), ready[0].id), (1, 12));
        // It is not twice in the set, and who is gone is forgotten.
        paused.pause(&epoll, &listener, 3);
        paused.resume(&epoll, 10, |_| None::<&Listener>);
        assert!(paused.0.is_empty());
    }
}
