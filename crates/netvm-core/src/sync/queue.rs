//! A wait queue: processes wait in it until others wake them, first come, first served.

use alloc::collections::VecDeque;

use super::home::{Out, SessionId, Who};
use super::message::{Op, Refusal, Reply, Signal};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Queue {
    waiting: VecDeque<(Who, u32)>,
}

impl Queue {
    pub(super) fn handle(&mut self, who: Who, generation: u32, op: Op, out: &mut Out) -> Reply {
        match op {
            Op::Enqueue => {
                self.waiting.push_back((who, generation));
                out.used.push(who);
                Reply::Queued
            }
            Op::Wake { count } => {
                let count = self.waiting.len().min(count as usize);
                for (who, generation) in self.waiting.drain(..count) {
                    out.end(who, generation, Signal::Granted);
                }
                Reply::Done(count as u64)
            }
            Op::Cancel => match self.waiting.iter().position(|waiting| *waiting == (who, generation)) {
                Some(at) => {
                    self.waiting.remove(at);
                    out.freed.push(who);
                    Reply::Cancelled
                }
                None => Reply::Queued,
            },
            _ => Reply::Refused(Refusal::WrongKind),
        }
    }

    pub(super) fn session_ended(&mut self, session: SessionId) {
        self.waiting.retain(|(who, _)| who.session != session);
    }

    pub(super) fn close(&mut self, out: &mut Out) {
        for (who, generation) in self.waiting.drain(..) {
            out.end(who, generation, Signal::Closed);
        }
    }
}
