//! Waiting, handlers and the descriptor, with threads. The interleavings of the board itself are checked in netvm-core.

use super::*;
use std::sync::mpsc;

const SOON: Option<Duration> = Some(Duration::from_secs(10));

fn count(number: u16) -> Notify {
    Notify::Count { number }
}

fn post(number: u16, value: u32) -> Notify {
    Notify::Post { number, value: NonZeroU32::new(value).unwrap() }
}

#[test]
fn waits_end_with_a_notification_or_in_time() {
    let board = Notifications::new(4, std::sync::Weak::new());
    let start = Instant::now();
    assert!(!board.wait(0, Some(Duration::from_millis(20))));
    assert!(!board.spin(0, Some(Duration::from_millis(2))));
    assert_eq!(board.wait_any(0..4, Some(Duration::ZERO)), None);
    assert!(start.elapsed() >= Duration::from_millis(22));
    assert!(!board.notify(count(4)), "beyond the board");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| board.wait(1, Some(Duration::MAX)));
        std::thread::sleep(Duration::from_millis(5));
        board.notify(count(1));
        assert!(waiter.join().unwrap() && board.acknowledge(1));
    });
    assert!(board.notify(count(2)) && board.notify(count(2)) && board.notify(post(3, 7)));
    assert_eq!((board.test(2), board.value(3).unwrap().get()), (2, 7));
    assert!(board.wait_count(2, 2, SOON) && !board.wait_count(2, 3, Some(Duration::from_millis(1))));
    assert_eq!([0; 3].map(|_| board.wait_any(0..4, SOON)), [Some(2), Some(3), Some(2)], "in turn");
    assert!(board.acknowledge(2) && board.acknowledge(2) && !board.acknowledge(2));
    assert_eq!((board.reset(3).unwrap().get(), board.reset(3)), (7, None));
    assert_eq!(board.test_any(0..4), None);
}

#[test]
fn who_is_notified_through_memory_seldom_looks_at_the_links() {
    use crate::node::{LinkChoice, Node, Rights};
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let memory = Node::memory(4096).unwrap();
    let (key, board) = server.export_notified("memory", memory, Rights::ReadWrite, 2).unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let import = |link| {
        let peer = client.connect(&address).unwrap();
        peer.choose(link);
        peer.import("memory", &key).unwrap()
    };
    let (mapped, posted) = (import(LinkChoice::Shm), import(LinkChoice::Socket));
    let spun_for = |region: &crate::region::Region| {
        let spinning = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                spinning.store(true, Ordering::Release);
                board.spin(0, SOON) && board.acknowledge(0)
            });
            while !spinning.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(2));
            region.notify(count(0)).unwrap();
            assert!(waiter.join().unwrap());
        });
    };
    for _ in 0..3 {
        spun_for(&mapped);
        assert!(board.inner().from_memory.load(Ordering::Relaxed));
        let polls = || server.shared().polls.load(Ordering::Relaxed);
        let (start, before) = (Instant::now(), polls());
        assert!(!board.spin(1, Some(Duration::from_millis(2))));
        let most = start.elapsed().as_nanos() as u64 / LINKS_EVERY_NS + 1;
        assert!((polls() - before) as u64 <= most, "{} polls, not {most}", polls() - before);
        spun_for(&posted);
        assert!(!board.inner().from_memory.load(Ordering::Relaxed));
    }
}

/// A process that is killed between its signal and the wake-up has taken the sleepers' marks from the bell.
#[test]
fn who_dies_before_it_wakes_anybody_keeps_nobody_asleep() {
    use crate::node::{LinkChoice, Node, Rights};
    use std::os::fd::AsRawFd;
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let memory = Node::memory(4096).unwrap();
    let (key, board) = server.export_notified("memory", memory, Rights::ReadWrite, 2).unwrap();
    let peer = client.connect(&server.listen("127.0.0.1:0").unwrap()).unwrap();
    peer.choose(LinkChoice::Shm);
    let region = peer.import("memory", &key).unwrap();
    assert_eq!(region.link(), "shm");
    let mut watched =
        [libc::pollfd { fd: board.descriptor().unwrap().as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    let mut is_readable = |timeout| netvm_sys::thread::poll(&mut watched, Some(timeout)).unwrap() > 0;
    assert!(board.rearm(0..2) && !is_readable(Duration::ZERO));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| board.wait(0, SOON));
        let start = Instant::now();
        while board.board().bell().load(Ordering::Relaxed) & 1 == 0 {
            assert!(start.elapsed() < Duration::from_secs(5), "nobody sleeps");
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(50));
        let wake = board.board().deliver(count(0)).unwrap();
        assert!(wake.sleepers && wake.descriptor);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!waiter.is_finished() && !is_readable(Duration::ZERO));
        let start = Instant::now();
        // As one that is cut has it: nothing is given back first.
        drop(client);
        assert!(waiter.join().unwrap() && is_readable(Duration::from_secs(5)));
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    });
}

#[test]
fn many_waiters_take_every_signal_once() {
    const EACH: u64 = 20_000;
    let board = Notifications::new(3, std::sync::Weak::new());
    let taken = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for signal in 0..EACH {
                    board.notify(count((signal % 2) as u16));
                    if signal % 1000 == 0 {
                        std::thread::sleep(Duration::from_micros(100));
                    }
                }
            });
        }
        for _ in 0..3 {
            scope.spawn(|| {
                // The third number says that it is over.
                while let Some(number) = board.wait_any(0..3, SOON) {
                    if number == 2 {
                        return;
                    }
                    if board.acknowledge(number) && taken.fetch_add(1, Ordering::Relaxed) + 1 == 2 * EACH {
                        board.notify(post(2, 1));
                    }
                }
                panic!("a wake-up was lost");
            });
        }
    });
    assert_eq!(taken.into_inner(), 2 * EACH);
    assert_eq!((board.test(0), board.test(1)), (0, 0));
}

#[test]
fn ping_pong_between_blocked_threads_never_stalls() {
    let (ping, pong) =
        (Notifications::new(1, std::sync::Weak::new()), Notifications::new(1, std::sync::Weak::new()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..20_000 {
                assert!(ping.wait(0, SOON));
                ping.acknowledge(0);
                pong.notify(count(0));
            }
        });
        for _ in 0..20_000 {
            ping.notify(count(0));
            assert!(pong.wait(0, SOON));
            pong.acknowledge(0);
        }
    });
}

#[test]
fn the_descriptor_wakes_a_poller_and_coalesces() {
    let board = Notifications::new(2, std::sync::Weak::new());
    let readable = |milliseconds| {
        let mut fds = [netvm_sys::thread::readable(&board.descriptor().unwrap())];
        netvm_sys::thread::poll(&mut fds, Some(Duration::from_millis(milliseconds))).unwrap() == 1
    };
    board.notify(count(0));
    assert!(!readable(0), "not armed yet");
    assert!(!board.rearm(0..2), "pending already");
    assert!(board.rearm(1..2));
    assert!(!readable(0));
    board.notify(count(1));
    board.notify(count(1));
    assert!(readable(0) && readable(0), "until it is armed again");
    assert_eq!(board.inner().descriptor.get().unwrap().take(), 1, "one write for two signals");
    board.acknowledge_many(1, 9);
    assert!(board.rearm(1..2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            board.notify(count(1));
        });
        assert!(readable(10_000));
    });
}

#[test]
fn handlers_are_called_once_for_each_signal() {
    let board = Notifications::new(3, std::sync::Weak::new());
    let (tell, told) = mpsc::channel();
    board.notify(count(1));
    board.notify(post(1, 5));
    let tell_one = tell.clone();
    board.arm(1, move |notify| tell_one.send(notify).unwrap()).unwrap();
    assert_eq!([0; 2].map(|_| told.recv_timeout(Duration::from_secs(10)).unwrap()), [count(1), post(1, 5)]);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..5000).for_each(|_| assert!(board.notify(count(1)))));
        }
    });
    for _ in 0..10_000 {
        assert_eq!(told.recv_timeout(Duration::from_secs(10)).unwrap(), count(1));
    }
    assert!(board.disarm(1) && !board.disarm(1));
    board.notify(count(1));
    assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
    assert_eq!(board.test(1), 1, "what was not handled stays");
    assert!(board.arm(3, |_| ()).is_err());
}

#[test]
fn arming_and_disarming_among_signals_loses_none_and_doubles_none() {
    const SIGNALS: u64 = 20_000;
    let board = Notifications::new(1, std::sync::Weak::new());
    let calls = Arc::new(AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| (0..SIGNALS).for_each(|_| assert!(board.notify(count(0)))));
        for _ in 0..300 {
            let (counted, live) = (Arc::clone(&calls), Arc::new(AtomicBool::new(true)));
            let still_live = Arc::clone(&live);
            let handler = move |_| {
                assert!(still_live.load(Ordering::Relaxed), "called after it was disarmed");
                counted.fetch_add(1, Ordering::Relaxed);
            };
            board.arm(0, handler).unwrap();
            std::thread::yield_now();
            assert!(board.disarm(0), "a handler has panicked");
            live.store(false, Ordering::Relaxed);
        }
    });
    assert_eq!(calls.load(Ordering::Relaxed) + board.test(0), SIGNALS);
    assert_eq!(board.inner().board.signals(0), SIGNALS);
}

#[test]
fn a_handler_may_disarm_itself_and_may_panic() {
    let board = Notifications::new(2, std::sync::Weak::new());
    let (tell, told) = mpsc::channel();
    let inside = board.clone();
    board
        .arm(0, move |_| {
            assert!(inside.disarm(0));
            tell.send(()).unwrap();
        })
        .unwrap();
    (0..3).for_each(|_| assert!(board.notify(count(0))));
    told.recv_timeout(Duration::from_secs(10)).unwrap();
    assert!(told.recv_timeout(Duration::from_secs(10)).is_err(), "its closure has gone");
    assert_eq!(board.test(0), 2);
    std::panic::set_hook(Box::new(|_| ()));
    board.arm(1, |_| panic!("on purpose")).unwrap();
    board.notify(count(1));
    let deadline = Instant::now() + Duration::from_secs(10);
    while lock(&board.inner().dispatch).thread.is_some() {
        assert!(Instant::now() < deadline, "the dispatcher must end");
        std::thread::yield_now();
    }
    let _ = std::panic::take_hook();
    assert!(!board.disarm(1), "a handler that panicked is disarmed");
}

#[test]
fn a_dispatcher_ends_with_its_board() {
    let board = Notifications::new(1, std::sync::Weak::new());
    board.arm(0, |_| ()).unwrap();
    let inner = Arc::downgrade(board.inner());
    drop(board);
    let deadline = Instant::now() + Duration::from_secs(10);
    while inner.strong_count() > 0 {
        assert!(Instant::now() < deadline, "the dispatcher must end");
        std::thread::yield_now();
    }
}

#[test]
fn arming_finds_what_is_pending_while_the_dispatcher_sleeps() {
    let board = Notifications::new(2, std::sync::Weak::new());
    let (tell, told) = mpsc::channel();
    board.arm(0, |_| ()).unwrap();
    board.notify(count(1));
    std::thread::sleep(Duration::from_millis(30));
    board.arm(1, move |notify| tell.send(notify).unwrap()).unwrap();
    assert_eq!(told.recv_timeout(Duration::from_secs(10)), Ok(count(1)));
}

#[test]
fn disarming_waits_for_the_call_that_runs() {
    let board = Notifications::new(1, std::sync::Weak::new());
    let (tell, told) = mpsc::channel();
    let ended = Arc::new(AtomicBool::new(false));
    let ends = Arc::clone(&ended);
    let handler = move |_| {
        tell.send(()).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        ends.store(true, Ordering::Relaxed);
    };
    board.arm(0, handler).unwrap();
    board.notify(count(0));
    told.recv_timeout(Duration::from_secs(10)).unwrap();
    assert!(board.disarm(0));
    assert!(ended.load(Ordering::Relaxed), "disarmed while it runs");
}

fn queued(number: u16, value: u32) -> Notify {
    Notify::Queue { number, value: NonZeroU32::new(value).unwrap() }
}

#[test]
fn a_queue_keeps_everything_in_order_and_no_more_than_it_has_places() {
    let board = Notifications::new(3, std::sync::Weak::new());
    assert!(!board.notify(queued(0, 1)) && board.remove().is_none(), "not open");
    assert!(board.open_queue(0).is_err() && board.open_queue(4097).is_err());
    board.open_queue(4).unwrap();
    assert!(board.open_queue(4).is_err());
    for round in 0..10 {
        assert!((1..=4).all(|value| board.notify(queued((value % 3) as u16, value + round))));
        assert!(!board.notify(queued(0, 9)), "no place");
        assert!(!board.notify(queued(3, 9)), "no such number");
        assert!(!board.rearm(0..3), "the queue counts");
        let taken = std::iter::from_fn(|| board.remove()).map(|(number, value)| (number, value.get()));
        let expected = (1..=4).map(|value| ((value % 3) as u16, value + round));
        assert!(taken.eq(expected));
    }
    assert_eq!(board.wait_remove(Some(Duration::from_millis(5))), None);
    assert_eq!(board.wait_any(0..3, Some(Duration::ZERO)), None, "numbers know nothing of it");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| board.wait_remove(SOON));
        std::thread::sleep(Duration::from_millis(5));
        assert!(board.notify(queued(2, 77)));
        assert_eq!(waiter.join().unwrap().map(|(number, value)| (number, value.get())), Some((2, 77)));
    });
}

#[test]
fn writers_of_a_queue_wait_for_places_and_lose_nothing() {
    use crate::error::Error;
    use crate::node::{Node, Rights};
    use crate::region::WriteOptions;
    const EACH: u32 = 3000;
    let server = Node::new().unwrap();
    let memory = Node::memory(4096).unwrap();
    let (key, board) = server.export_notified("queue", Arc::clone(&memory), Rights::ReadWrite, 4).unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let open = || {
        let node = Node::new().unwrap();
        let region = node.connect(&address).unwrap().import("queue", &key).unwrap();
        (node, region)
    };
    let (_node, region) = open();
    let one = NonZeroU32::MIN;
    assert!(matches!(region.enqueue(0, one, Some(Duration::ZERO)), Err(Error::Op { .. })), "no queue");
    board.open_queue(16).unwrap();
    for _ in 0..16 {
        region.notify(queued(1, 5)).unwrap();
    }
    assert!(matches!(region.enqueue(1, one, Some(Duration::from_millis(3))), Err(Error::WouldBlock { .. })));
    // A refused write takes no place for good.
    (0..16).for_each(|_| assert!(board.remove().is_some()));
    let bad = WriteOptions { fence: false, notify: Some(queued(1, 5)) };
    let local = Node::memory(4096).unwrap();
    for _ in 0..40 {
        region.write_with(8, &[1; 8], bad).unwrap();
        assert_eq!(board.wait_remove(SOON).unwrap().1.get(), 5);
    }
    region.post().write(0, &[local.shared()], bad).unwrap().wait().unwrap();
    assert!(board.wait_remove(SOON).is_some());
    // Several writers: each one's values in order, all of them, with the data before.
    std::thread::scope(|scope| {
        for writer in 0..3u16 {
            let open = &open;
            scope.spawn(move || {
                let (_node, region) = open();
                for value in 1..=EACH {
                    region.write(u64::from(writer) * 8, &u64::from(value).to_ne_bytes()).unwrap();
                    region.enqueue(writer, NonZeroU32::new(value).unwrap(), None).unwrap();
                }
            });
        }
        let mut next = [1; 3];
        while next != [EACH + 1; 3] {
            let (number, value) = board.wait_remove(SOON).expect("something was lost");
            let writer = usize::from(number);
            assert_eq!(value.get(), next[writer]);
            next[writer] += 1;
            let seen = memory.shared().with_u64(writer * 8, |word| word.load(Ordering::Acquire)).unwrap();
            assert!(seen >= u64::from(value.get()), "the data comes first");
            assert!(board.queued() <= 3 * 16);
        }
    });
    assert_eq!(board.remove(), None);
}
