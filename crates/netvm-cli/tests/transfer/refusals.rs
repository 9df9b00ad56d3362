//! What cannot be meant is refused, with what to do.

use super::*;

#[test]
fn other_framings_are_told_apart_from_other_servers() {
    let (_folder, source, target) = folders("transfer-framings");
    let file = random_file(&source.join("a"), 10);
    for (receives, sends) in [(&["--framing", "simple"][..], &[][..]), (&[][..], &["--framing", "simple"])] {
        let receiver = Receiver::start(&target, receives);
        let done = finish(&mut send(&receiver.address, &[&file], sends));
        assert!(!done.status.success() && done.err.contains("--framing"), "{done:?}");
        assert!(!done.err.contains("check the address"), "{done:?}");
    }
}
