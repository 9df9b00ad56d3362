//! Words that others write as they like.

use super::tests::{Alone, LOCK, ModelWord};
use super::*;

#[test]
fn permits_in_words_are_bounded() {
    let mut semaphore = Alone::new(Kind::Semaphore { permits: 3 });
    semaphore.home.give_word(semaphore.id, ModelWord(0));
    let word = |semaphore: &mut Alone| semaphore.home.word(semaphore.id).unwrap().0;
    let permits = |semaphore: &mut Alone| match Near::see_permits(word(semaphore), 1) {
        Seen::Free(fewer) => Near::more_permits(fewer, 1).unwrap().1,
        Seen::Taken => 0,
        Seen::Home => panic!("the home has them"),
    };
    assert_eq!(permits(&mut semaphore), 3);
    assert_eq!(
        semaphore.ask(1, 0, 1, Op::Acquire { count: 1, wait: true, owned: true }),
        Reply::Granted { abandoned: false }
    );
    assert_eq!(permits(&mut semaphore), 2, "somebody owns one, and the others are there");
    // Who waits is served first, whoever adds.
    assert_eq!(semaphore.ask(2, 0, 1, Op::Acquire { count: 3, wait: true, owned: false }), Reply::Queued);
    let claimed = word(&mut semaphore);
    assert_eq!((Near::see_permits(claimed, 1), Near::more_permits(claimed, 1)), (Seen::Home, None));
    assert_eq!(semaphore.ask(1, 0, 0, Op::Add { count: 2 }), Reply::Done(1));
    assert_eq!(semaphore.signals(), [(2, 0, Signal::Granted)]);
    assert_eq!(permits(&mut semaphore), 1);
    // Somebody who dies with what he owns is told of before the word is used again.
    semaphore.home.session_ended(SessionId(1));
    assert_eq!(Near::see_permits(word(&mut semaphore), 1), Seen::Home);
    assert_eq!(
        semaphore.ask(3, 0, 1, Op::Acquire { count: 2, wait: true, owned: true }),
        Reply::Granted { abandoned: true }
    );
    assert_eq!(permits(&mut semaphore), 0);
    // Whatever is written there: what is owned comes back, and nothing overflows.
    semaphore.home.word(semaphore.id).unwrap().0 = !CLAIMED;
    assert_eq!(semaphore.ask(4, 0, 0, Op::Add { count: 1 }), Reply::Refused(Refusal::Number));
    semaphore.home.released(SessionId(3), Ticket { slot: 0, generation: 1 });
    assert_eq!(semaphore.home.units(semaphore.id), Some((u32::MAX, 0)));
    assert_eq!(Near::see_permits(word(&mut semaphore), 1), Seen::Home, "too many for a word");
}

#[test]
fn words_are_not_believed() {
    let mut lock = Alone::new(Kind::Monitor { conditions: 1 });
    assert_eq!(lock.ask(1, 0, 0, Op::Near), Reply::Refused(Refusal::WrongKind), "it has no word");
    lock.home.give_word(lock.id, ModelWord(0));
    let near = |lock: &mut Alone, session| match lock.ask(session, 0, 0, Op::Near) {
        Reply::Done(near) => Near::from_u64(near).unwrap(),
        reply => panic!("{reply:?}"),
    };
    let (one, two) = (near(&mut lock, 1), near(&mut lock, 2));
    assert_eq!(near(&mut lock, 1), one, "a session has one seat");
    let Seen::Free(taken) = one.see(0) else { panic!("it is not free") };
    let Ticket { slot, generation } = one.ticket();
    // It has the lock, and the home finds so.
    lock.home.word(lock.id).unwrap().0 = taken;
    assert_eq!(lock.ask(2, slot, generation, Op::Release), Reply::Refused(Refusal::NotHeld), "another's");
    assert_eq!(lock.ask(1, slot, generation + 1, Op::Release), Reply::Refused(Refusal::NotHeld));
    assert_eq!(
        lock.ask(1, slot, generation, Op::Wait { condition: 0, next: 1 }),
        Reply::Refused(Refusal::Full)
    );
    assert_eq!(lock.ask(1, slot, generation, Op::Notify { condition: 0, all: true }), Reply::Done(0));
    assert_eq!(lock.ask(2, 0, 1, LOCK), Reply::Queued);
    // Whatever is written there while the home decides.
    for nonsense in [0, taken, u64::MAX, !CLAIMED, 2 * 77] {
        lock.home.word(lock.id).unwrap().0 = nonsense;
        assert_eq!(lock.ask(3, 0, 1, Op::Acquire { count: 1, wait: false, owned: true }), Reply::Busy);
        assert_eq!(lock.home.tickets(), 2);
    }
    lock.home.released(SessionId(1), one.ticket());
    assert_eq!(lock.signals(), [(2, 0, Signal::Granted)]);
    lock.home.released(SessionId(2), Ticket { slot: 0, generation: 1 });
    assert!(matches!(two.see(lock.home.word(lock.id).unwrap().0), Seen::Free(_)));
    // Nobody's seat: nobody has it. Its session has ended: the next one is told.
    lock.home.word(lock.id).unwrap().0 = 2 * 77;
    assert_eq!(lock.ask(3, 0, 1, LOCK), Reply::Granted { abandoned: false });
    lock.home.released(SessionId(3), Ticket { slot: 0, generation: 1 });
    let word = lock.home.word(lock.id).unwrap();
    let Seen::Free(taken) = two.see(word.0) else { panic!("it is not free") };
    word.0 = taken;
    lock.home.session_ended(SessionId(2));
    assert_eq!(lock.ask(3, 0, 2, LOCK), Reply::Granted { abandoned: true });
    lock.home.session_ended(SessionId(3));
    lock.home.close(lock.id);
    assert_eq!(lock.home.tickets(), 0);
}
