//! The header, the library and the manual say the same.

use crate::common::{self, archive, header, install, installed, source};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::process::Command;

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Without its comments.
fn bare_header() -> String {
    let header = header();
    let mut rest = header.as_str();
    let mut bare = String::new();
    while let Some((before, comment)) = rest.split_once("/*") {
        bare.push_str(before);
        rest = comment.split_once("*/").expect("a comment ends").1;
    }
    bare + rest
}

#[test]
fn every_standard_takes_the_header_without_a_warning() {
    let header = source().join("include/netvm.h");
    for (compiler, language, standards) in
        [("cc", "c", &["c99", "gnu99", "c11", "c17"][..]), ("c++", "c++", &["c++11", "c++17", "c++20"][..])]
    {
        if Command::new(compiler).arg("--version").output().is_err() {
            println!("skipped ({compiler} is not installed)");
            continue;
        }
        for standard in standards {
            let mut command = Command::new(compiler);
            command.args(["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-fsyntax-only"]);
            let output = command.arg(format!("-std={standard}")).args(["-x", language]).arg(&header).output();
            let output = output.unwrap();
            assert!(output.status.success(), "{standard}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

#[test]
fn the_shared_library_has_what_the_header_declares_and_nothing_else() {
    let declared: BTreeSet<String> = install::functions(&header()).into_iter().collect();
    assert!(declared.len() > 80);
    let library = installed().place.libraries().join("libnetvm.so");
    let library = library.to_str().unwrap();
    let symbols = run("nm", &["-D", "--defined-only", "--with-symbol-versions", library]);
    let exported: BTreeSet<String> = symbols
        .lines()
        .filter(|line| !line.ends_with("A NETVM_0.1@@NETVM_0.1") && !line.ends_with(" A NETVM_0.1"))
        .map(|line| {
            let symbol = line.split_whitespace().last().unwrap();
            symbol.strip_suffix("@@NETVM_0.1").unwrap_or_else(|| panic!("{line} has no version")).to_owned()
        })
        .collect();
    assert_eq!(exported, declared);
    let dynamic = run("readelf", &["-d", library]);
    assert!(dynamic.contains(&format!("[{}]", install::SONAME)), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}

#[test]
fn sizes_offsets_and_numbers_agree() {
    let ours = netvm_c::layout::all();
    let header = bare_header();
    // Every number that the header defines is compared.
    let enumerators = header.lines().filter_map(|line| {
        let (name, value) = line.trim().split_once(" = ")?;
        let value = value.split([',', ' ']).next()?;
        (name.starts_with("NETVM_") && value.parse::<i64>().is_ok()).then_some(name)
    });
    let limits = header.lines().filter_map(|line| {
        let name = line.strip_prefix("#define ")?.split_whitespace().next()?;
        (name.contains("_MAX") || name.ends_with("_BYTES")).then_some(name)
    });
    let mut count = 0;
    for name in enumerators.chain(limits) {
        assert!(ours.iter().any(|(other, _)| other == name), "{name} is not known here");
        count += 1;
    }
    assert!(count > 50, "{count}");
    let mut program = String::from("#include <netvm.h>\n#include <stdio.h>\nint main(void) {\n");
    for (expression, _) in &ours {
        writeln!(program, "printf(\"%lld\\n\", (long long)({expression}));").unwrap();
    }
    program.push_str("return 0;\n}\n");
    let source = installed().place.destdir.join("numbers.c");
    std::fs::write(&source, program).unwrap();
    let Some(program) = installed().build(&source, "numbers", &[]) else { return };
    let output = installed().command(&program).output().unwrap();
    let theirs = common::succeeded("numbers", &output);
    assert_eq!(theirs.lines().count(), ours.len());
    for ((expression, ours), theirs) in ours.iter().zip(theirs.lines()) {
        assert_eq!(theirs, ours.to_string(), "{expression}");
    }
}

/// The C type of a parameter of an exported function.
fn c_type(rust: &str) -> String {
    let handle = |rust: &str| {
        let name = match rust {
            "Node" => "node",
            "PeerHandle" => "peer",
            "Memory" => "memory",
            "PagerHandle" => "pager",
            "RegionHandle" => "region",
            "Board" => "board",
            "Posted" => "op",
            "Counter" => "counter",
            "ReceiverHandle" => "receiver",
            "SenderHandle" => "sender",
            "LockHandle" => "lock",
            "ReadWriteHandle" => "rwlock",
            "SemaphoreHandle" => "semaphore",
            "MonitorHandle" => "monitor",
            "WaitQueue" => "wait_queue",
            "Waiting" => "waiting",
            "GroupHandle" => "group",
            other => panic!("the handle {other} is not known to this test"),
        };
        format!("netvm_{name}")
    };
    let value = |rust: &str| {
        match rust {
            "[u8; 16]" => "netvm_key",
            "Signal" => "netvm_signal",
            "Piece" => "netvm_iov",
            "NodeOptions" => "netvm_node_options",
            "ConnectOptions" => "netvm_connect_options",
            "PagerOptions" => "netvm_pager_options",
            "RegionInfo" => "netvm_region_info",
            "PostOptions" => "netvm_post_options",
            "Counts" => "netvm_counts",
            "FarCounts" => "netvm_far_counts",
            "Received" => "netvm_message",
            "Buffer" => "netvm_buffer",
            "Place" => "netvm_location",
            "Stat" => "netvm_stat",
            "LenderState" => "netvm_lender_state",
            "u32" => "uint32_t",
            "u64" => "uint64_t",
            "i64" => "int64_t",
            "usize" => "size_t",
            "c_int" => "int",
            "*mut c_void" => "void *",
            "Address" => "void *const ",
            other => panic!("the type {other} is not known to this test"),
        }
        .to_owned()
    };
    let generic = rust.split_once('<').map(|(name, inner)| (name, inner.strip_suffix('>').unwrap()));
    let text = match generic {
        Some(("Ref" | "Own", inner)) => handle(inner) + "*",
        Some(("OutHandle", inner)) => handle(inner) + "**",
        Some(("In" | "Options", inner)) => format!("const {}*", value(inner)),
        Some(("Out" | "OutArray", inner)) => value(inner) + "*",
        Some(("Option", "CallbackFunction")) => "netvm_handler".to_owned(),
        _ => match rust {
            "Text" | "*const c_char" => "const char*".to_owned(),
            "OutText" => "char*".to_owned(),
            "Source" | "Address" => "const void*".to_owned(),
            "Descriptor" => "int".to_owned(),
            "Target" | "User" => "void*".to_owned(),
            plain => value(plain),
        },
    };
    text.replace(' ', "")
}

/// `const char *name`, `char text[33]` or `int` without the name, and without spaces.
fn type_of(parameter: &str) -> String {
    let parameter = parameter.trim();
    if parameter == "void" {
        return String::new();
    }
    let (parameter, is_array) = match parameter.split_once('[') {
        Some((before, _)) => (before, true),
        None => (parameter, false),
    };
    let name = parameter.rfind([' ', '*']).expect("parameters have names") + 1;
    let pointer = if is_array { "*" } else { "" };
    format!("{}{pointer}", &parameter[..name]).split_whitespace().collect()
}

#[test]
fn prototypes_agree() {
    let mut ours = std::collections::HashMap::new();
    for file in source().join("src").read_dir().unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for function in text.split("pub extern \"C\" fn ").skip(1) {
            let (name, rest) = function.split_once('(').unwrap();
            // The body of a macro: what it makes is skipped below.
            if name.starts_with('$') {
                continue;
            }
            let (parameters, rest) = rest.split_once(") -> ").unwrap();
            let parameters = parameters.replace("[u8; 16]", "[u8;16]");
            let types = parameters.split(',').filter_map(|parameter| parameter.split_once(':'));
            let types: Vec<_> =
                types.map(|(_, rust)| c_type(&rust.trim().replace("[u8;16]", "[u8; 16]"))).collect();
            let result = c_type(rest.split_once(" {").unwrap().0);
            ours.insert(name.to_owned(), (types, result));
        }
    }
    let header = bare_header();
    let mut compared = 0;
    for declaration in header.split("NETVM_API ").skip(2) {
        let (before, rest) = declaration.split_once('(').unwrap();
        let (parameters, _) = rest.split_once(");").unwrap();
        let result = type_of(before);
        let name = before.rsplit([' ', '*']).next().unwrap();
        let types: Vec<_> = parameters.split(',').map(type_of).filter(|text| !text.is_empty()).collect();
        // Those made by a macro are called with all their results checked in tests/c/api.c.
        if name.starts_with("netvm_atomic_") || name.ends_with("_close") && !ours.contains_key(name) {
            continue;
        }
        if name == "netvm_group_leave" {
            continue;
        }
        let (ours, our_result) = ours.get(name).unwrap_or_else(|| panic!("{name} is not implemented"));
        assert_eq!(&types, ours, "{name}");
        assert_eq!(&result, our_result, "{name}");
        compared += 1;
    }
    assert!(compared > 70, "{compared}");
}

#[test]
fn only_one_file_follows_pointers() {
    for file in source().join("src").read_dir().unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap().replace("#[unsafe(no_mangle)]", "");
        let is_unsafe = text.lines().any(|line| !line.trim().starts_with("//") && line.contains("unsafe"));
        assert_eq!(is_unsafe, path.ends_with("ffi.rs"), "{}", path.display());
    }
}

#[test]
fn pkg_config_knows_both_libraries() {
    let Some(flags) = installed().flags(&["--static", "--libs"]) else { return };
    assert!(flags.contains(&"-lnetvm".to_owned()) && flags.contains(&"-lpthread".to_owned()), "{flags:?}");
    let version = installed().flags(&["--modversion"]).unwrap();
    assert_eq!(version, [env!("CARGO_PKG_VERSION")]);
}

/// A program that has the whole library in it.
#[test]
fn the_static_library_suffices() {
    let folder = &installed().place.destdir;
    let source = folder.join("static.c");
    let text = "#include <netvm.h>\nint main(void) { netvm_node *node; return netvm_node_create(NULL, &node) || netvm_node_destroy(node); }\n";
    std::fs::write(&source, text).unwrap();
    let Some(mut flags) = installed().flags(&["--static", "--cflags", "--libs"]) else { return };
    let library = installed().place.libraries().join("libnetvm.a").display().to_string();
    flags.iter_mut().filter(|flag| *flag == "-lnetvm").for_each(|flag| flag.clone_from(&library));
    let program = folder.join("static");
    let output = Command::new("cc").arg("-o").arg(&program).arg(&source).args(&flags).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(Command::new(&program).status().unwrap().success());
    assert!(archive().exists());
}

#[test]
fn manual_pages_are_clean_and_complete() {
    let manual = installed().place.folder("share/man");
    let overview = std::fs::read_to_string(manual.join("man3/netvm.3")).unwrap();
    for function in install::functions(&header()) {
        let alias = std::fs::read_to_string(manual.join(format!("man3/{function}.3"))).unwrap();
        assert_eq!(alias, ".so man3/netvm.3\n");
        assert!(overview.contains(&function), "{function} is not in netvm(3)");
    }
    for page in ["man3/netvm.3", "man7/netvm.7"] {
        let path = manual.join(page);
        let mut checked = false;
        // Either of them, as installed.
        for (program, arguments) in
            [("mandoc", &["-Tlint", "-Wwarning"][..]), ("groff", &["-mandoc", "-Tutf8", "-ww", "-z"][..])]
        {
            match Command::new(program).args(arguments).arg(&path).output() {
                Ok(output) => {
                    let said = [output.stdout, output.stderr].concat();
                    let said = String::from_utf8_lossy(&said);
                    assert!(output.status.success() && said.trim().is_empty(), "{page}: {said}");
                    checked = true;
                }
                Err(_) => println!("skipped ({program} is not installed)"),
            }
        }
        assert!(
            checked || cfg!(not(target_os = "linux")) || !std::path::Path::new("/usr/bin/groff").exists()
        );
    }
}
