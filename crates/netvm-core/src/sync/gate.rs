//! Locks, monitors, reader-writer locks and semaphores: units that processes take in the order in which they asked.
//!
//! A lock has one unit. A reader takes one of a reader-writer lock's [`WRITER`] units and a writer all of them. Who is first in the queue
//! and wants more than there is keeps the others waiting, so nobody starves.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::WRITER;
use super::home::{Out, SessionId, Who};
use super::message::{Op, Refusal, Reply, Signal, Ticket};
use super::near::NEAR_PERMITS_MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum GateKind {
    Lock,
    ReadWrite,
    Semaphore,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    who: Who,
    generation: u32,
    count: u32,
    owned: bool,
    /// It waits to come back into the monitor after this condition.
    condition: Option<usize>,
    /// The time for the condition was over.
    expired: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Holding {
    generation: u32,
    count: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Gate {
    kind: GateKind,
    free: u32,
    /// Units that came back from the dead and of which nobody has been told.
    abandoned: u32,
    holders: BTreeMap<Who, Holding>,
    queue: VecDeque<Waiting>,
    conditions: Vec<VecDeque<Waiting>>,
}

impl Gate {
    pub(super) fn new(kind: GateKind, units: u32, conditions: usize) -> Self {
        let conditions = (0..conditions).map(|_| VecDeque::new()).collect();
        Self { kind, free: units, abandoned: 0, holders: BTreeMap::new(), queue: VecDeque::new(), conditions }
    }

    pub(super) fn handle(&mut self, who: Who, generation: u32, op: Op, out: &mut Out) -> Reply {
        match op {
            Op::Acquire { count, wait, owned } => self.acquire(who, generation, count, wait, owned, out),
            Op::Release => self.release(who, generation, out),
            Op::Cancel => self.cancel(who, generation, out),
            Op::Add { count } => self.add(count, out),
            Op::Wait { condition, next } => self.wait(who, generation, condition, next, out),
            Op::Notify { condition, all } => self.notify(who, generation, condition, all),
            _ => Reply::Refused(Refusal::WrongKind),
        }
    }

    fn acquire(
        &mut self,
        who: Who,
        generation: u32,
        count: u32,
        wait: bool,
        owned: bool,
        out: &mut Out,
    ) -> Reply {
        let allowed = match self.kind {
            GateKind::Lock => count == 1 && owned,
            GateKind::ReadWrite => (count == 1 || count == WRITER) && owned,
            GateKind::Semaphore => count > 0,
        };
        if !allowed {
            return Reply::Refused(Refusal::Number);
        }
        let waiting = Waiting { who, generation, count, owned, condition: None, expired: false };
        if self.queue.is_empty() && self.free >= count {
            if owned {
                out.used.push(who);
            }
            return Reply::Granted { abandoned: self.take(&waiting) };
        }
        if !wait {
            return Reply::Busy;
        }
        out.used.push(who);
        self.queue.push_back(waiting);
        Reply::Queued
    }

    fn release(&mut self, who: Who, generation: u32, out: &mut Out) -> Reply {
        let Some(count) = self.held(who, generation) else { return Reply::Refused(Refusal::NotHeld) };
        self.holders.remove(&who);
        out.freed.push(who);
        self.free += count;
        self.pump(out);
        Reply::Done(0)
    }

    fn cancel(&mut self, who: Who, generation: u32, out: &mut Out) -> Reply {
        let same = |waiting: &Waiting| waiting.who == who && waiting.generation == generation;
        // Whoever was inside a monitor must come back into it: he only stops waiting for the condition.
        if let Some(at) = self.queue.iter().position(|waiting| same(waiting) && waiting.condition.is_none()) {
            self.queue.remove(at);
            out.freed.push(who);
            // It may have been the first and wanted more than there is.
            self.pump(out);
            return Reply::Cancelled;
        }
        for condition in 0..self.conditions.len() {
            let waits = &mut self.conditions[condition];
            if let Some(waiting) = waits.iter().position(same).and_then(|at| waits.remove(at)) {
                self.queue.push_back(Waiting { condition: Some(condition), expired: true, ..waiting });
                self.pump(out);
                break;
            }
        }
        Reply::Queued
    }

    fn add(&mut self, count: u32, out: &mut Out) -> Reply {
        if self.kind != GateKind::Semaphore {
            return Reply::Refused(Refusal::WrongKind);
        }
        // Those in possession come back some day: all together must fit.
        if self.all() + u64::from(count) > u64::from(u32::MAX) {
            return Reply::Refused(Refusal::Number);
        }
        self.free += count;
        self.pump(out);
        Reply::Done(u64::from(self.free))
    }

    fn wait(&mut self, who: Who, generation: u32, condition: u32, next: u32, out: &mut Out) -> Reply {
        let Some(count) = self.held(who, generation) else { return Reply::Refused(Refusal::NotHeld) };
        let Some(waits) = self.conditions.get_mut(condition as usize) else {
            return Reply::Refused(Refusal::Number);
        };
        self.holders.remove(&who);
        waits.push_back(Waiting {
            who,
            generation: next,
            count,
            owned: true,
            condition: None,
            expired: false,
        });
        self.free += count;
        self.pump(out);
        Reply::Queued
    }

    fn notify(&mut self, who: Who, generation: u32, condition: u32, all: bool) -> Reply {
        if self.held(who, generation).is_none() {
            return Reply::Refused(Refusal::NotHeld);
        }
        let condition = condition as usize;
        let Some(waits) = self.conditions.get(condition) else { return Reply::Refused(Refusal::Number) };
        let count = waits.len().min(if all { usize::MAX } else { 1 });
        for _ in 0..count {
            self.signal(condition);
        }
        Reply::Done(count as u64)
    }

    /// Moves the first who waits for a condition to the queue for the monitor: he needs it next anyway.
    fn signal(&mut self, condition: usize) {
        if let Some(waiting) = self.conditions[condition].pop_front() {
            self.queue.push_back(Waiting { condition: Some(condition), ..waiting });
        }
    }

    /// Everything of a process that has died.
    pub(super) fn session_ended(&mut self, session: SessionId, out: &mut Out) {
        let dead = |who: &Who| who.session == session;
        // A dead man's signal goes to the next.
        let signals = self.queue.iter().filter(|waiting| dead(&waiting.who) && !waiting.expired);
        let signals: Vec<usize> = signals.filter_map(|waiting| waiting.condition).collect();
        self.queue.retain(|waiting| !dead(&waiting.who));
        for waits in &mut self.conditions {
            waits.retain(|waiting| !dead(&waiting.who));
        }
        for condition in signals {
            self.signal(condition);
        }
        let mut holders = core::mem::take(&mut self.holders);
        holders.retain(|who, holding| {
            if dead(who) {
                self.free += holding.count;
                self.abandoned = match self.kind {
                    GateKind::Lock => 1,
                    // A reader leaves nothing half done.
                    GateKind::ReadWrite => self.abandoned | u32::from(holding.count == WRITER),
                    GateKind::Semaphore => self.abandoned.saturating_add(holding.count),
                };
            }
            !dead(who)
        });
        self.holders = holders;
        self.pump(out);
    }

    /// The object goes: all who wait are told, and all tickets are free.
    pub(super) fn close(&mut self, out: &mut Out) {
        let waiting = self.conditions.iter().flatten().chain(&self.queue);
        for Waiting { who, generation, .. } in waiting {
            out.end(*who, *generation, Signal::Closed);
        }
        out.freed.extend(self.holders.keys());
    }

    /// Somebody has taken the only unit without asking; false when there was none.
    pub(super) fn taken(&mut self, who: Who, generation: u32) -> bool {
        let is_free = self.kind == GateKind::Lock && self.free == 1 && self.queue.is_empty();
        if is_free {
            self.free = 0;
            self.holders.insert(who, Holding { generation, count: 1 });
        }
        is_free
    }

    /// What one ticket has is another's from now on.
    pub(super) fn pass(&mut self, from: (Who, u32), to: (Who, u32), out: &mut Out) -> Reply {
        let Some(count) = self.held(from.0, from.1) else { return Reply::Refused(Refusal::NotHeld) };
        self.holders.remove(&from.0);
        self.holders.insert(to.0, Holding { generation: to.1, count });
        out.freed.push(from.0);
        out.used.push(to.0);
        Reply::Done(0)
    }

    /// Nobody has it, or wants it, or is to be told of a death. Of a semaphore others may have permits: those in the word are free.
    pub(super) fn is_quiet(&self) -> bool {
        let calm = self.queue.is_empty() && self.abandoned == 0;
        match self.kind {
            GateKind::Semaphore => calm && self.all() <= u64::from(NEAR_PERMITS_MAX),
            GateKind::Lock | GateKind::ReadWrite => calm && self.holders.is_empty(),
        }
    }

    /// Permits that are free or somebody's.
    fn all(&self) -> u64 {
        let held = self.holders.values().map(|holding| u64::from(holding.count)).sum::<u64>();
        held + u64::from(self.free)
    }

    /// The permits of a semaphore for its word; `None` for all else.
    pub(super) fn permits(&self) -> Option<u32> {
        (self.kind == GateKind::Semaphore).then_some(self.free)
    }

    /// So many permits were left in the word. Whatever is written there, all together fit.
    pub(super) fn found(&mut self, permits: u32) {
        self.free = 0;
        let room = u64::from(u32::MAX).saturating_sub(self.all());
        self.free = u64::from(permits).min(room) as u32;
    }

    fn held(&self, who: Who, generation: u32) -> Option<u32> {
        let holding = self.holders.get(&who)?;
        (holding.generation == generation).then_some(holding.count)
    }

    /// Hands over to the first in the queue, as many as there are units for.
    fn pump(&mut self, out: &mut Out) {
        while let Some(first) = self.queue.front()
            && self.free >= first.count
        {
            let Some(first) = self.queue.pop_front() else { break };
            let abandoned = self.take(&first);
            let Waiting { who, generation, expired, .. } = first;
            out.signal(who, Ticket { slot: who.slot, generation }, Signal::turn(abandoned, expired));
            if !first.owned {
                out.freed.push(who);
            }
        }
    }

    /// Gives what it waited for; true when somebody died with it.
    fn take(&mut self, waiting: &Waiting) -> bool {
        let Waiting { who, generation, count, .. } = *waiting;
        self.free -= count;
        if waiting.owned {
            self.holders.insert(who, Holding { generation, count });
        }
        let told = self.abandoned.min(count);
        // Readers cannot repair anything: they are told until a writer has been.
        if self.kind != GateKind::ReadWrite || count == WRITER {
            self.abandoned -= told;
        }
        told > 0
    }

    #[cfg(test)]
    pub(super) fn units(&self) -> (u32, u32) {
        (self.free, self.holders.values().map(|holding| holding.count).sum())
    }
}
