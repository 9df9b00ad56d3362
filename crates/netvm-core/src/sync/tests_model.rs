//! All steps of small worlds, with the state machines that run.

use alloc::vec;
use alloc::vec::Vec;

use stateright::{Checker, Model, Property};

use super::Kind;
use super::tests::{Action, World};

struct Small {
    kind: Kind,
    processes: usize,
    turns: u8,
    deaths: u8,
}

impl Model for Small {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.kind, self.processes, 1, self.turns, self.deaths)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.broken.is_none() {
            actions.extend(world.actions());
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut world = world.clone();
        world.apply(action);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("exclusive, in order, deaths told once", |_, world: &World| {
                world.broken.is_none()
            }),
            Property::always("never stuck", |_, world: &World| {
                !world.actions().is_empty() || world.is_at_rest()
            }),
        ]
    }
}

fn check(kind: Kind, processes: usize, turns: u8, deaths: u8) -> usize {
    let model = Small { kind, processes, turns, deaths };
    let checker = model.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    checker.unique_state_count()
}

#[test]
fn locks_in_all_orders() {
    assert!(check(Kind::LOCK, 2, 2, 1) > 1000);
    assert!(check(Kind::LOCK, 2, 1, 2) > 1000);
    assert!(check(Kind::LOCK, 3, 1, 1) > 1000);
}

#[test]
fn semaphores_in_all_orders() {
    assert!(check(Kind::Semaphore { permits: 2 }, 3, 1, 1) > 1000);
    assert!(check(Kind::Semaphore { permits: 2 }, 2, 2, 1) > 1000);
}

#[test]
fn reader_writer_locks_in_all_orders() {
    assert!(check(Kind::ReadWriteLock, 3, 1, 2) > 1000);
}

#[test]
fn monitors_in_all_orders() {
    assert!(check(Kind::Monitor { conditions: 2 }, 2, 2, 1) > 1000);
    assert!(check(Kind::Monitor { conditions: 2 }, 2, 3, 0) > 1000);
}
