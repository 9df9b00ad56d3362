//! The programs, and what they are given.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;

use super::measure::Work;
use super::redis;

/// A program of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum App {
    /// Sorts random numbers
    NumpySort,
    /// Multiplies matrices
    NumpyMatmul,
    /// A database in memory: inserts, an index, queries, updates
    Sqlite,
    /// Requests per second and latency, of keys that are chosen at random
    Redis,
    /// A hash join in C++
    Join,
    /// PageRank in C++, on a graph whose degrees follow a power law
    Pagerank,
    /// An ordered map in C++, gone through again and again
    Tree,
    /// Compiles a large file
    Gcc,
}

const PYTHON: &str = "/usr/bin/python3";
const JOIN: &str = include_str!("join.cpp");
const PAGERANK: &str = include_str!("pagerank.cpp");
const TREE: &str = include_str!("tree.cpp");

impl App {
    pub fn name(self) -> &'static str {
        match self {
            App::NumpySort => "numpy-sort",
            App::NumpyMatmul => "numpy-matmul",
            App::Sqlite => "sqlite",
            App::Redis => "redis",
            App::Join => "join",
            App::Pagerank => "pagerank",
            App::Tree => "tree",
            App::Gcc => "gcc",
        }
    }

    pub fn unit(self) -> &'static str {
        if self == App::Redis { "us" } else { "s" }
    }

    /// Makes what it needs.
    ///
    /// # Errors
    /// Why it cannot be measured here.
    pub fn prepare(self, folder: &Path, quick: bool) -> Result<Work, String> {
        let work = |program: &str, arguments: &[&str]| Work {
            program: program.into(),
            arguments: arguments.iter().map(OsString::from).collect(),
            input: None,
            writes: None,
            folder: folder.to_owned(),
            server: None,
        };
        let pick = |small: u32, large: u32| if quick { small } else { large }.to_string();
        match self {
            App::NumpySort => {
                let script = "import hashlib, numpy, sys\n\
                    a = numpy.random.default_rng(7).integers(0, 2**63, size=int(sys.argv[1]), dtype=numpy.int64)\n\
                    a.sort()\n\
                    print(hashlib.sha256(a).hexdigest())\n";
                Ok(work(numpy()?, &["-c", script, &pick(4 << 20, 32 << 20)]))
            }
            App::NumpyMatmul => {
                // Whole numbers, so that the order of additions does not matter.
                let script = "import hashlib, numpy, sys\n\
                    n, r = int(sys.argv[1]), numpy.random.default_rng(7)\n\
                    a, b = (r.integers(0, 1000, size=(n, n)).astype(float) for _ in range(2))\n\
                    print(hashlib.sha256(numpy.ascontiguousarray(a @ b)).hexdigest())\n";
                Ok(work(numpy()?, &["-c", script, &pick(800, 2400)]))
            }
            App::Sqlite => {
                needs("sqlite3")?;
                let path = folder.join("sqlite.sql");
                write(&path, &sqlite_script(if quick { 60_000 } else { 600_000 }))?;
                Ok(Work { input: Some(path), ..work("sqlite3", &[":memory:"]) })
            }
            App::Redis => {
                needs("redis-server")?;
                needs("redis-benchmark")?;
                let (small, large) = ((12_000, 20_000), (100_000, 200_000));
                let (keys, requests) = if quick { small } else { large };
                let load = redis::Load { keys, requests };
                Ok(Work { server: Some(load), ..work("redis-server", &redis::ARGUMENTS) })
            }
            App::Join => Ok(work(&compile(folder, "join", JOIN)?, &[&pick(600_000, 6_000_000)])),
            App::Pagerank => Ok(work(&compile(folder, "pagerank", PAGERANK)?, &[&pick(400_000, 4_000_000)])),
            App::Tree => Ok(work(&compile(folder, "tree", TREE)?, &[&pick(250_000, 1_000_000)])),
            App::Gcc => {
                needs("gcc")?;
                let (source, object) = (folder.join("large.c"), folder.join("large.o"));
                write(&source, &large_source(if quick { 300 } else { 2500 }))?;
                Ok(Work { writes: Some(object), ..work("gcc", &["-O2", "-c", "large.c", "-o", "large.o"]) })
            }
        }
    }
}

/// Whether a program is there.
fn needs(program: &str) -> Result<(), String> {
    crate::elf::find(program).map(drop).map_err(|_| format!("{program} is not installed"))
}

fn numpy() -> Result<&'static str, String> {
    let found = Command::new(PYTHON).args(["-c", "import numpy"]).output();
    match found {
        Ok(output) if output.status.success() => Ok(PYTHON),
        _ => Err(format!("{PYTHON} has no numpy (package python3-numpy)")),
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn compile(folder: &Path, name: &str, text: &str) -> Result<String, String> {
    needs("g++")?;
    let (source, program): (PathBuf, PathBuf) = (folder.join(format!("{name}.cpp")), folder.join(name));
    write(&source, text)?;
    let output = Command::new("g++").arg("-O2").arg("-o").arg(&program).arg(&source).output();
    let output = output.map_err(|error| format!("g++: {error}"))?;
    if !output.status.success() {
        return Err(format!("g++ does not compile {name}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(program.display().to_string())
}

fn sqlite_script(rows: u32) -> String {
    format!(
        "create table t (id integer primary key, k integer, v text);\n\
         with recursive n(i) as (select 1 union all select i + 1 from n where i < {rows})\n\
           insert into t select i, (i * 2654435761) % 4294967296, hex(i * 40503) || printf('%0200d', i) from n;\n\
         create index t_k on t (k);\n\
         select count(*), sum(k), sum(length(v)) from t;\n\
         select id, k, length(v) from t order by k limit 100 offset {};\n\
         update t set v = upper(v) || id where k % 5 = 0;\n\
         delete from t where k % 7 = 0;\n\
         select count(*), sum(id), sum(length(v)), max(v) from t;\n",
        rows / 2
    )
}

fn large_source(functions: u32) -> String {
    let mut state = 3_u64;
    let mut number = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % 1000 + 1
    };
    let mut source = String::new();
    for function in 0..functions {
        // Writing to a string cannot fail.
        let _ = writeln!(source, "int f{function}(int *a, int n) {{ int s = {};", number());
        for _ in 0..6 {
            let _ = writeln!(
                source,
                "for (int i = 0; i < n; i++) {{ s += a[i] * {}; if (s % {} == 0) a[i] ^= s; switch (s & 7) {{ case 1: s -= {}; break; \
                 case 3: s *= {}; break; default: s ^= i; }} }}",
                number(),
                number(),
                number(),
                number()
            );
        }
        source.push_str("return s; }\n");
    }
    source
}
