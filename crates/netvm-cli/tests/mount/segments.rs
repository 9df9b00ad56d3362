//! Segments of processes as files.

use super::*;

#[test]
fn segments_of_a_running_node() {
    if !can_mount("segments_of_a_running_node", &["/usr/bin/python3"]) {
        return;
    }
    let folder = Folder::new("mount-segments");
    let node = Node::new().unwrap();
    let address = node.listen("127.0.0.1:0").unwrap();
    // Mapped by the mount: this process uses the files of what it exports itself.
    let memory = Node::memory(300_000).unwrap();
    let data = bytes(5, memory.shared().len());
    memory.shared().write_from(0, &data).unwrap();
    let size = data.len() as u64;
    let key = |name: &str, rights| {
        let path = folder.path(&format!("{name}.key"));
        fs::write(&path, node.export(name, memory.clone(), rights).unwrap().to_text()).unwrap();
        path.display().to_string()
    };
    let (full, half) = (key("full", Rights::ReadWrite), key("half", Rights::Read));
    let segments = [
        format!("a,name=full,at={address},key={full}"),
        format!("b,name=half,at={address},key={half}"),
        format!("c,name=full,at={address},key={full},read-only"),
    ];
    let mount = Mount::start_by(
        "auto",
        &folder,
        "mount",
        1,
        &["--segment", &segments[0], "--segment", &segments[1], "--segment", &segments[2]],
    );
    let modes: Vec<u32> =
        ["a", "b", "c"].map(|name| fs::metadata(mount.path(name)).unwrap().mode() & 0o777).into();
    assert_eq!(modes, [0o644, 0o444, 0o444]);
    for name in ["a", "b", "c"] {
        assert!(fs::read(mount.path(name)).unwrap() == data, "{name}");
    }
    let file = File::options().read(true).write(true).open(mount.path("a")).unwrap();
    file.write_all_at(b"written", 5000).unwrap();
    file.sync_all().unwrap();
    let mut seen = [0; 7];
    memory.shared().read_into(5000, &mut seen).unwrap();
    assert_eq!(&seen, b"written");
    // The other way round, with the file open.
    memory.shared().write_from(70_000, b"changed").unwrap();
    file.read_exact_at(&mut seen, 70_000).unwrap();
    assert_eq!(&seen, b"changed");
    // Its size is fixed, and its rights hold, for root too.
    fails_with(file.set_len(10), 1);
    fails_with(file.write_all_at(b"x", size), ENOSPC);
    fails_with(fs::remove_file(mount.path("a")), 1);
    for name in ["b", "c"] {
        let file = File::options().write(true).open(mount.path(name)).unwrap();
        fails_with(file.write_all_at(b"x", 0), EROFS);
    }
    // Without lent memory nothing else can be there.
    fs::write(mount.path("empty"), "").unwrap();
    fails_with(
        File::create(mount.path("empty"))
            .unwrap()
            .write_all(b"x")
            .and_then(|()| File::open(mount.path("empty"))?.sync_all()),
        ENOSPC,
    );
    // By another process, as a kernel before 6.6 cannot map them to be shared.
    const SCRIPT: &str = "
import mmap, sys
with open(sys.argv[1], 'r+b') as f:
    try: m = mmap.mmap(f.fileno(), 0)
    except OSError as error: sys.exit('mmap: %d' % error.errno)
    m[9000:9010] = b'by mapping'
    m.flush()
    print(m[5000:5007].decode())
";
    let done = finish(Command::new("/usr/bin/python3").args(["-c", SCRIPT]).arg(mount.path("a")));
    if done.status.success() {
        assert_eq!(done.out(), "written\n");
        let mut seen = [0; 10];
        memory.shared().read_into(9000, &mut seen).unwrap();
        assert_eq!(&seen, b"by mapping");
    } else {
        assert_eq!(done.err.trim(), "mmap: 19");
    }
    drop(node);
    fails_with(file.read_exact_at(&mut seen, 0), EIO);
    common::until("the loss is told", || mount.log().contains("a segment failed"));
    drop(file);
    mount.end();
}

/// In the environment of a child of these tests: its folder, and the kind of memory that it exports.
const CHILD: &str = "NETVM_TEST_EXPORTER";
const EDEADLK: i32 = 35;
const ENODEV: i32 = 19;
const CHILD_BYTES: usize = 8 << 20;

/// A process that exports memory and uses the file that a mount makes of it: what the child below does.
#[test]
fn exporter() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let (kind, folder) = told.split_once(' ').unwrap();
    let folder = PathBuf::from(folder);
    let node = Node::new().unwrap();
    let address = node.listen("127.0.0.1:0").unwrap();
    // None of it is there yet: whatever is received into it needs this process's memory map.
    let memory =
        if kind == "private" { Node::private_memory(CHILD_BYTES) } else { Node::memory(CHILD_BYTES) };
    let memory = memory.unwrap();
    let key = node.export("own", memory.clone(), Rights::ReadWrite).unwrap();
    fs::write(folder.join("key"), key.to_text()).unwrap();
    fs::write(folder.join("address.new"), address).unwrap();
    fs::rename(folder.join("address.new"), folder.join("address")).unwrap();
    let go = folder.join("go");
    until("the mount is there", || go.exists());
    let say = |result: &str| {
        fs::write(folder.join("result.new"), result).unwrap();
        fs::rename(folder.join("result.new"), folder.join("result")).unwrap();
    };
    let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(0).to_string();
    let file = File::options().read(true).write(true).open(folder.join("mount/own"));
    let data = bytes(77, CHILD_BYTES);
    match file.and_then(|file| Mapping::of_file(&file, true)) {
        Err(error) => say(&errno(error)),
        Ok(mapped) => {
            mapped.shared().write_from(0, &data).unwrap();
            // It is all written while the kernel holds this process's memory map.
            drop(mapped);
            let mut seen = vec![0; CHILD_BYTES];
            memory.shared().read_into(0, &mut seen).unwrap();
            say(if seen == data { "same" } else { "different" });
        }
    }
    // Until it is killed: others use its memory.
    std::thread::sleep(Duration::from_secs(60));
}

/// Starts the child above, shows what it exports, and waits for what it says.
fn own_memory(kind: &str, link: &str) -> (String, Guard, Mount, Folder) {
    let (said, child, mount, _, folder) = own_memory_by(kind, link, false);
    (said, child, mount, folder)
}

/// The same; with `joined` the child's mount has joined another one, which is given besides.
fn own_memory_by(kind: &str, link: &str, joined: bool) -> (String, Guard, Mount, Option<Mount>, Folder) {
    let folder = Folder::new(&format!("mount-own-{kind}-{link}-{joined}"));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "segments::exporter"]);
    command.env(CHILD, format!("{kind} {}", folder.path("").display()));
    let child = Guard(command.stdout(Stdio::null()).spawn().unwrap());
    until("memory is exported", || folder.path("address").exists());
    let address = fs::read_to_string(folder.path("address")).unwrap();
    let segment = format!("own,name=own,at={address},key={}", folder.path("key").display());
    let mut home = None;
    let mut mount = if joined {
        let share = format!("unix:{}", folder.path("share").display());
        home = Some(Mount::start_by(link, &folder, "home", 2, &["--segment", &segment, "--share", &share]));
        Mount::start_by(link, &folder, "mount", 1, &["--join", &share])
    } else {
        Mount::start_by(link, &folder, "mount", 1, &["--segment", &segment])
    };
    fs::write(folder.path("go"), "").unwrap();
    let result = folder.path("result");
    let end = Instant::now() + Duration::from_secs(40);
    while !result.exists() {
        if Instant::now() > end {
            let wait = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", child.0.id()));
            let (stack, status) = (wait("stack"), wait("status"));
            // With its server it can be killed.
            let _ = mount.process.0.kill();
            panic!("{kind}, {link}: it waits for itself: {stack:?} {status:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    (fs::read_to_string(result).unwrap(), child, mount, home, folder)
}

/// Nobody notices that a process uses its own memory there: it may lose what it has written, but does not wait for good.
#[test]
fn who_maps_his_own_memory_through_a_joined_mount_is_let_go() {
    if !can_mount("who_maps_his_own_memory_through_a_joined_mount_is_let_go", &[]) {
        return;
    }
    for kind in ["shareable", "private"] {
        let (said, child, mount, home, _folder) = own_memory_by(kind, "auto", true);
        let home = home.unwrap();
        match &said[..] {
            "same" => {}
            // Its memory could not be reached while it waited, and that is told.
            "different" if kind == "private" => {
                until("it is told", || home.log().contains("a segment failed (EIO)"));
            }
            _ => assert_eq!(said, ENODEV.to_string(), "{kind}: {}{}", mount.log(), home.log()),
        }
        drop(child);
        mount.end();
        home.end();
    }
}

#[test]
fn a_process_maps_the_memory_that_it_exports() {
    if !can_mount("a_process_maps_the_memory_that_it_exports", &[]) {
        return;
    }
    // Mapped by the mount, too: nobody waits for the process.
    let (said, child, mount, _folder) = own_memory("shareable", "auto");
    assert!(said == "same" || said == ENODEV.to_string(), "{said}: {}", mount.log());
    drop(child);
    mount.end();
    // What has to go through the process itself is refused, and everybody is told.
    for (kind, link) in [("private", "auto"), ("private", "socket"), ("shareable", "socket")] {
        let (said, child, mount, _folder) = own_memory(kind, link);
        assert_eq!(said, EDEADLK.to_string(), "{kind}, {link}: {}", mount.log());
        until("it is told", || mount.log().contains("could wait for itself"));
        // To others it is a file.
        let file = File::options().read(true).write(true).open(mount.path("own")).unwrap();
        let data = bytes(78, 100_000);
        file.write_all_at(&data, 12_345).unwrap();
        assert!(fs::read(mount.path("own")).unwrap()[12_345..][..data.len()] == data);
        drop((file, child));
        mount.end();
    }
}
