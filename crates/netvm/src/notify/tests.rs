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
