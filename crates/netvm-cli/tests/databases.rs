//! Databases under `netvm run`, by servers of this machine: what they answer is what they answer without, and their files are whole.

mod common;

use common::{Done, Folder, Guard, can_run, finish, has, netvm, until};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A server, told to end where a test fails: killed, `netvm run` leaves it behind.
struct Server(Guard);

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.0.0.try_wait(), Ok(None)) {
            common::signal(self.0.0.id(), "TERM");
            common::wait(&mut self.0.0, common::PATIENCE);
        }
    }
}

/// A PostgreSQL server of its own; its clients are other processes, without netvm.
struct Postgres {
    folder: Folder,
    programs: PathBuf,
    server: Option<Server>,
}

impl Postgres {
    /// It does not run as root; the pager needs userfaultfd.
    fn as_its_user(program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]);
        command.args(["--inh-caps=+sys_ptrace", "--ambient-caps=+sys_ptrace"]).arg(program);
        command
    }

    fn new(programs: &Path) -> Self {
        let folder = Folder::new("postgres");
        finish(Command::new("chown").arg("postgres").arg(folder.path(""))).must_succeed();
        let mut initdb = Self::as_its_user(programs.join("initdb"));
        let initdb = initdb.args(["--data-checksums", "--no-sync", "--auth=trust", "--locale=C", "-D"]);
        finish(initdb.arg(folder.path("data"))).must_succeed();
        Self { folder, programs: programs.to_owned(), server: None }
    }

    fn start(&mut self, before: &[&str]) {
        let postgres = self.programs.join("postgres").display().to_string();
        let words: Vec<&str> = before.iter().copied().chain([&*postgres]).collect();
        let err = std::fs::File::create(self.folder.path("err")).unwrap();
        let mut command = Self::as_its_user(words[0]);
        command.args(&words[1..]).arg("-D").arg(self.folder.path("data")).arg("-k").arg(self.folder.path(""));
        for setting in ["listen_addresses=", "shared_buffers=8MB", "work_mem=64MB", "fsync=off"] {
            command.args(["-c", setting]);
        }
        self.server = Some(Server(Guard(
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(err).spawn().unwrap(),
        )));
        until("PostgreSQL answers", || finish(self.client("psql").args(["-c", "select 1"])).status.success());
    }

    fn client(&self, program: &str) -> Command {
        let mut command = Self::as_its_user(self.programs.join(program));
        command.env("PGHOST", self.folder.path("")).env("PGDATABASE", "postgres").env("PGUSER", "postgres");
        command.current_dir(self.folder.path(""));
        command
    }

    #[track_caller]
    fn ask(&self, what: &str) -> String {
        finish(self.client("psql").args(["-Atq", "-v", "ON_ERROR_STOP=1", "-c", what])).must_succeed().out()
    }

    #[track_caller]
    fn stop(&mut self) -> String {
        let pid = std::fs::read_to_string(self.folder.path("data/postmaster.pid")).unwrap();
        common::signal(pid.lines().next().unwrap().parse().unwrap(), "INT");
        let mut server = self.server.take().unwrap();
        let status = common::wait(&mut server.0.0, common::PATIENCE).expect("PostgreSQL does not end");
        let err = std::fs::read_to_string(self.folder.path("err")).unwrap();
        assert!(status.success(), "{status}\n{err}");
        err
    }
}

/// Sorts, joins and aggregates in private memory; tables in shared memory; a fork for each connection.
const QUERIES: [&str; 5] = [
    "create table t as select i as id, md5(i::text) as v, (i::bigint * 2654435761) % 1000003 as k from generate_series(1, 100000) i",
    "select md5(string_agg(v, '' order by k, id)) from t",
    "select count(*), md5(string_agg(a.v || b.v, '' order by a.id)) from t a join t b on a.k = b.id",
    "create index on t (v)",
    "select md5(string_agg(id::text, ',')) from (select id from t where v like 'ab%' order by v) s",
];

#[test]
fn postgresql() {
    const TEST: &str = "postgresql";
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let programs = versions.map(|entry| entry.path().join("bin")).find(|path| path.join("postgres").exists());
    let Some(programs) = programs else {
        has(TEST, &["/usr/lib/postgresql"]);
        return;
    };
    if !can_run(TEST, &["/usr/bin/setpriv"]) {
        return;
    }
    // As root only: it must become another user that may use userfaultfd, and can read where this was built.
    let reachable = Postgres::as_its_user(netvm().get_program()).arg("doctor").output();
    if !reachable.is_ok_and(|output| output.status.success()) {
        let _ = std::io::Write::write_all(
            &mut std::io::stderr(),
            b"postgresql: skipped (no other user can run netvm here)\n",
        );
        return;
    }
    let mut postgres = Postgres::new(&programs);
    postgres.start(&["env"]);
    let plain = QUERIES.map(|query| postgres.ask(query));
    postgres.ask("drop table t");
    postgres.stop();
    let netvm = netvm().get_program().to_str().unwrap().to_owned();
    postgres.start(&[&netvm, "run", "--local", "12M", "--lend-size", "1G", "--json", "--"]);
    assert_eq!(QUERIES.map(|query| postgres.ask(query)), plain);
    finish(postgres.client("pgbench").args(["-i", "-q", "-s", "1"])).must_succeed();
    let done =
        finish(postgres.client("pgbench").args(["-n", "-c", "4", "-j", "2", "-t", "100"])).must_succeed();
    assert!(done.out().contains("actually processed: 400/400"), "{}", done.out());
    let same = "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history), \
        (select sum(tbalance) from pgbench_tellers) = (select sum(bbalance) from pgbench_branches)";
    assert_eq!(postgres.ask(same), "t|t\n");
    let err = postgres.stop();
    let done = Done { status: Default::default(), out: Vec::new(), err, elapsed: Default::default() };
    done.must_have_used_far_memory();
    let mut check = postgres.client("pg_checksums");
    let checked = finish(check.arg("--check").arg("-D").arg(postgres.folder.path("data"))).must_succeed();
    assert!(checked.out().contains("Bad checksums:  0"), "{}", checked.out());
}

/// With a buffer pool several times as large as the local memory, which InnoDB fills by O_DIRECT.
struct MariaDb {
    folder: Folder,
    server: Option<Server>,
}

impl MariaDb {
    const PROGRAMS: [&str; 3] = ["/usr/sbin/mariadbd", "/usr/bin/mariadb-install-db", "/usr/bin/mariadb"];

    fn new(name: &str) -> Self {
        let folder = Folder::new(name);
        let mut install = Command::new(Self::PROGRAMS[1]);
        install.args(["--no-defaults", "--user=root", "--auth-root-authentication-method=normal"]);
        let mut data = std::ffi::OsString::from("--datadir=");
        data.push(folder.path("data"));
        finish(install.arg(data)).must_succeed();
        Self { folder, server: None }
    }

    fn setting(&self, name: &str, file: &str) -> String {
        format!("--{name}={}", self.folder.path(file).display())
    }

    fn start(&mut self, mut command: Command) {
        command.args(["--no-defaults", "--user=root", "--skip-networking", "--performance-schema=off"]);
        command.args(["--innodb-flush-method=O_DIRECT", "--innodb-flush-log-at-trx-commit=0"]);
        // It would reserve 8 TiB, to grow into.
        command.args(["--innodb-buffer-pool-size=48M", "--loose-innodb-buffer-pool-size-max=48M"]);
        command.args(
            [("datadir", "data"), ("socket", "socket"), ("pid-file", "pid")]
                .map(|(name, file)| self.setting(name, file)),
        );
        let err = std::fs::File::create(self.folder.path("err")).unwrap();
        let server = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(err).spawn().unwrap();
        self.server = Some(Server(Guard(server)));
        until("MariaDB answers", || finish(self.client().args(["-e", "select 1"])).status.success());
    }

    fn client(&self) -> Command {
        let mut command = Command::new(Self::PROGRAMS[2]);
        command.args(["--no-defaults", "-N", &self.setting("socket", "socket"), "mysql"]);
        command
    }

    #[track_caller]
    fn ask(&self, what: &str) -> String {
        finish(self.client().args(["-e", what])).must_succeed().out()
    }

    #[track_caller]
    fn stop(&mut self) -> Done {
        let mut server = self.server.take().unwrap();
        common::signal(server.0.0.id(), "TERM");
        let status = common::wait(&mut server.0.0, common::PATIENCE).expect("MariaDB does not end");
        let err = std::fs::read_to_string(self.folder.path("err")).unwrap();
        assert!(status.success(), "{status}\n{err}");
        Done { status, out: Vec::new(), err, elapsed: Default::default() }
    }
}

/// Tables and an index that do not fit the pool, read in order and at random.
const TABLE: &str = "create table a (id int primary key auto_increment, k int, s varbinary(400), key (k)) engine=innodb; \
    insert into a (k, s) select seq * 7919 % 1000003, repeat(md5(seq), 8) from seq_1_to_120000; \
    update a set s = reverse(s) where k % 3 = 0";
const SUMS: &str = "select count(*), sum(crc32(s)), sum(k) from a; \
    select sum(crc32(s)) from a force index (k) where k between 1000 and 300000; checksum table a";

/// With moves as without (before Linux 6.8), where it does without asynchronous reads.
#[test]
fn mariadb() {
    if !can_run("mariadb", &MariaDb::PROGRAMS) {
        return;
    }
    let mut server = MariaDb::new("mariadb");
    server.start(Command::new(MariaDb::PROGRAMS[0]));
    server.ask(TABLE);
    let plain = server.ask(SUMS);
    server.stop();
    for without in ["", "move,poison,wp-async"] {
        let mut run = netvm();
        run.args(["run", "--local", "16M", "--lend-size", "512M", "--json", "--", MariaDb::PROGRAMS[0]]);
        run.env("NETVM_WITHOUT", without);
        server.start(run);
        // What was written without, and what is written anew.
        assert_eq!(server.ask(SUMS), plain, "{without}");
        server.ask(&format!("drop table a; {TABLE}"));
        assert_eq!(server.ask(SUMS), plain, "{without}");
        assert!(server.ask("check table a extended").ends_with("OK\n"), "{without}");
        let done = server.stop();
        done.must_have_used_far_memory();
        assert!(!done.err.to_lowercase().contains("corrupt"), "{}", done.err);
    }
    // Without again: its files are whole.
    server.start(Command::new(MariaDb::PROGRAMS[0]));
    assert_eq!(server.ask(SUMS), plain);
    server.stop();
}
