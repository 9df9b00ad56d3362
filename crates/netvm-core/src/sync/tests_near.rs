//! Words that others write as they like.

use super::tests::{Alone, LOCK, ModelWord};
use super::*;

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
