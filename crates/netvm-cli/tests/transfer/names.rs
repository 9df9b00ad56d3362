//! Names with several addresses.

use super::*;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A name with two addresses, at the second of which bytes go on to the receiver. Whoever has come there once would be told something else
/// at the first one from then on.
#[test]
fn all_connections_go_where_the_first_one_went() {
    const TEST: &str = "all_connections_go_where_the_first_one_went";
    const NAME: &str = "two.netvm.test";
    let (folder, source, target) = folders("transfer-names");
    let hosts = folder.path("hosts");
    fs::write(&hosts, format!("127.0.0.1 {NAME}\n127.0.0.2 {NAME}\n")).unwrap();
    let within = |how: &str, command: &Command| {
        let mut inner = Command::new("unshare");
        inner.args([how, "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""]).arg(&hosts);
        inner.arg(command.get_program()).args(command.get_args());
        inner
    };
    let mut looks = Command::new("getent");
    looks.args(["ahostsv4", NAME]);
    let known = ["-m", "-Urm"].into_iter().find_map(|how| {
        let done = finish(&mut within(how, &looks));
        let mut found: Vec<String> =
            done.out().lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect();
        found.dedup();
        (found.len() == 2).then(|| (how, found[0].clone(), found[1].clone()))
    });
    let Some((how, first, second)) = known else {
        let _ = writeln!(std::io::stderr(), "{TEST}: skipped (no name can be made here)");
        return;
    };
    let file = random_file(&source.join("long"), 40_000_000);
    for (arguments, least) in [(&["--streams", "3"][..], 4), (&ONESIDED, 2)] {
        let _ = fs::remove_file(target.join("long"));
        let receiver = Receiver::start_at("127.0.0.3:0", &target, &[]);
        let port = TcpListener::bind((first.as_str(), 0)).unwrap().local_addr().unwrap().port();
        let right = TcpListener::bind((second.as_str(), port)).unwrap();
        let (to, at) = (receiver.address.clone(), first.clone());
        let counts = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        let counted = Arc::clone(&counts);
        std::thread::spawn(move || {
            for here in right.incoming() {
                let (here, there) = (here.unwrap(), TcpStream::connect(&to).unwrap());
                if counted.0.fetch_add(1, Ordering::SeqCst) == 0 {
                    let (wrong, counted) =
                        (TcpListener::bind((at.as_str(), port)).unwrap(), Arc::clone(&counted));
                    std::thread::spawn(move || {
                        for _ in wrong.incoming() {
                            counted.1.fetch_add(1, Ordering::SeqCst);
                        }
                    });
                }
                for (mut from, mut into) in
                    [(here.try_clone().unwrap(), there.try_clone().unwrap()), (there, here)]
                {
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut into);
                        let _ = into.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        let sent = finish(&mut within(how, &send(&format!("{NAME}:{port}"), &[&file], arguments)));
        let wrong = counts.1.load(Ordering::SeqCst);
        assert!(sent.status.success() && wrong == 0, "{wrong} went elsewhere: {sent:?}");
        let received = receiver.end();
        assert!(received.status.success(), "{received:?}");
        assert_same_file(&file, &target.join("long"));
        let right = counts.0.load(Ordering::SeqCst);
        assert!(right >= least, "{arguments:?}: {right} connections");
    }
}
