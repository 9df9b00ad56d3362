//! What a lender asks back, from whom, and who does not answer. See docs/design/lending.md.

use std::time::Instant;

use netvm_core::recall::{Ask, Limits, Reading};
use netvm_sys::epoll::Interest;

use super::pressure;
use super::protocol::{self, Recall};
use super::server::{Lender, Peer, Served, TICK};
use crate::link::session::Failure;

/// Token of the calls that ask for memory.
const WISH: u64 = 1;

impl Served {
    /// Asks for the latest wish, when the one before has been answered: one that does not answer must not use up all places for calls.
    pub(super) fn send_wish(&mut self) {
        if let Some(recall) = self.wish.filter(|_| !self.asking)
            && self.session.endpoint.post_call(WISH, protocol::RECALL, recall.encode()).is_ok()
        {
            (self.wish, self.asking) = (None, true);
        }
    }

    /// A call has been answered.
    pub(super) fn answered(&mut self, token: u64) {
        if token == WISH {
            self.asking = false;
            self.send_wish();
        }
    }
}

impl Lender {
    /// Asks borrowers for memory that this machine is short of.
    pub(super) fn look_after_memory(&mut self, now: Instant) {
        let config = &self.config;
        let limits = Limits { reserve_bytes: config.reserve_bytes, stall: config.stall };
        let is_packed = self.memories.packing().is_some();
        if limits == Limits::default() && !is_packed || self.draining {
            return;
        }
        let reading = Reading {
            available_bytes: pressure::available_bytes(&config.meminfo_file)
                .filter(|_| limits.reserve_bytes > 0),
            stall: pressure::stall(&config.pressure_file).filter(|_| limits.stall > 0),
        };
        let (used_bytes, packed) = (self.memories.slabs.used_bytes(), self.memories.missing_bytes());
        let missing = limits.missing(reading, used_bytes).max(packed);
        self.is_short = missing > 0;
        // What has come back is there soon.
        let missing = missing.saturating_sub(self.memories.slabs.uncleared_bytes());
        let held: Vec<(u64, u64)> = (0..self.peers.len())
            .filter_map(|index| Some((index as u64, self.held(index)?)))
            .filter(|&(_, bytes)| bytes > 0)
            .collect();
        let (was_missing, was_stuck) = (self.recalls.missing() > 0, self.recalls.is_stuck());
        let now_ms = now.saturating_duration_since(self.started).as_millis() as u64;
        let asks = self.recalls.look(now_ms, missing, &held);
        if missing > 0 && !was_missing {
            let why = if is_packed && packed >= missing {
                "what is lent does not shrink enough"
            } else {
                "this machine is short of memory"
            };
            self.say(format_args!("{why}: asking borrowers for {} MiB", missing.div_ceil(1 << 20)));
        }
        if self.recalls.is_stuck() && !was_stuck {
            self.say(format_args!(
                "nobody else can take what is lent to {}: serving on, though memory is short",
                counted(held.len())
            ));
        }
        for Ask { borrower, bytes } in asks {
            self.ask(borrower as usize, Recall { bytes, leaving: false });
        }
        if missing == 0 && was_missing {
            self.say(format_args!("there is memory enough again"));
        }
    }

    /// Bytes that a borrower holds.
    fn held(&self, index: usize) -> Option<u64> {
        match self.peers.get(index)? {
            Some(Peer::Served(served)) => Some(self.memories.slabs.lease_bytes(served.lease?)),
            _ => None,
        }
    }

    fn ask(&mut self, index: usize, recall: Recall) {
        if let Some(Some(Peer::Served(served))) = self.peers.get_mut(index) {
            served.cannot = false;
            served.asked_to_leave |= recall.leaving;
            served.wish = Some(recall);
            served.send_wish();
            self.attend(index, Interest { readable: false, writable: true });
        }
    }

    /// Asks everybody who has not been asked to move what they have to other lenders.
    pub(super) fn ask_all_to_leave(&mut self) {
        for index in 0..self.peers.len() {
            let is_new = matches!(&self.peers[index], Some(Peer::Served(served)) if !served.asked_to_leave);
            if let Some(bytes) = self.held(index).filter(|_| is_new) {
                self.ask(index, Recall { bytes, leaving: true });
            }
        }
    }

    /// Once: that nobody who is left can leave.
    fn tell_stuck(&mut self) {
        let stays = |peer: &Option<Peer>| match peer {
            Some(Peer::Served(served)) if served.lease.is_some() => Some(served.cannot),
            _ => None,
        };
        let left: Vec<bool> = self.peers.iter().filter_map(stays).collect();
        if self.told_stuck || left.is_empty() || left.contains(&false) {
            return;
        }
        self.told_stuck = true;
        let mib = self.memories.slabs.used_bytes() >> 20;
        self.say(format_args!(
            "nobody else can take the {mib} MiB lent to {}: serving on until somebody can, or they end; SIGTERM ends it at once",
            counted(left.len())
        ));
    }

    /// Time in which this process did not look, because it was stopped or starved, is not borrowers' silence.
    pub(super) fn forgive(&mut self, now: Instant) {
        let late = now.saturating_duration_since(self.ticked).saturating_sub(2 * TICK);
        self.ticked = now;
        for peer in self.peers.iter_mut().flatten() {
            if let Peer::Served(served) = peer {
                served.heard += late;
            }
        }
    }

    /// Asks borrowers that were silent for long whether they are there, and gives up those that do not answer.
    pub(super) fn look_after_borrowers(&mut self, now: Instant) {
        if self.draining {
            self.ask_all_to_leave();
            self.tell_stuck();
        }
        let Some(timeout) = self.config.lease_timeout else { return };
        for index in 0..self.peers.len() {
            let Some(Some(Peer::Served(served))) = self.peers.get_mut(index) else { continue };
            let silent = now.saturating_duration_since(served.heard);
            if served.lease.is_none() || silent < timeout / 3 {
                continue;
            }
            if silent >= timeout && served.pinged {
                let reason = format!("it has not answered for {} s", silent.as_secs());
                if let Some(Peer::Served(served)) = self.peers[index].take() {
                    self.recalls.forget(index as u64);
                    served.lease.into_iter().for_each(|lease| self.memories.doubt(lease));
                    self.part(*served, &Failure::Link(std::io::Error::other(reason)));
                }
            } else if !served.pinged {
                // Where there is no room for it, calls have not been answered either.
                let _ = served.session.endpoint.post_call(0, protocol::PING, Vec::new());
                served.pinged = true;
                self.attend(index, Interest { readable: false, writable: true });
            }
        }
    }
}

/// So many borrowers, in words.
pub(super) fn counted(borrowers: usize) -> String {
    format!("{borrowers} borrower{}", if borrowers == 1 { "" } else { "s" })
}
