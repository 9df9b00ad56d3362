//! Can a preloaded library reach this program?

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Longest chain of `#!` interpreters to follow, as the kernel does.
const SCRIPTS_MAX: u32 = 5;
const PT_INTERP: u32 = 3;

/// Finds a program as execvp(3) does.
///
/// # Errors
/// A sentence saying that there is none.
pub fn find(program: &str) -> Result<PathBuf, String> {
    let is_program =
        |path: &Path| path.metadata().is_ok_and(|meta| meta.is_file() && meta.mode() & 0o111 != 0);
    if program.contains('/') {
        let path = PathBuf::from(program);
        return if is_program(&path) {
            Ok(path)
        } else {
            Err(format!("{program} is not a program that can be run"))
        };
    }
    std::env::var_os("PATH")
        .and_then(|path| {
            std::env::split_paths(&path).map(|dir| dir.join(program)).find(|path| is_program(path))
        })
        .ok_or_else(|| format!("there is no program {program} on the PATH"))
}

/// Why `netvm run` would have no effect on a program, as a sentence.
///
/// # Errors
/// When it is statically linked, has privileges that its user has not, or is not for glibc.
pub fn check(path: &Path) -> Result<(), String> {
    check_chain(path, SCRIPTS_MAX)
}

fn check_chain(path: &Path, depth: u32) -> Result<(), String> {
    let shown = path.display();
    let instead = "`netvm swap on` gives lent memory to all programs of a machine";
    let mut file = File::open(path).map_err(|error| format!("cannot read {shown}: {error}"))?;
    let mut head = Vec::new();
    file.by_ref()
        .take(4096)
        .read_to_end(&mut head)
        .map_err(|error| format!("cannot read {shown}: {error}"))?;
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = String::from_utf8_lossy(line.split(|&byte| byte == b'\n').next().unwrap_or_default())
            .into_owned();
        let mut words = line.split_ascii_whitespace();
        let Some(interpreter) = words.next() else { return Ok(()) };
        if depth == 0 {
            return Err(format!("{shown} names interpreters in a circle"));
        }
        let next = if interpreter.ends_with("/env") {
            match words.find(|word| !word.starts_with('-') && !word.contains('=')) {
                Some(program) => find(program)?,
                None => return Ok(()),
            }
        } else {
            PathBuf::from(interpreter)
        };
        return check_chain(&next, depth - 1);
    }
    // Of scripts the kernel takes no privileges.
    if let Ok(meta) = file.metadata()
        && let Some(what) =
            privileges((meta.mode(), meta.uid(), meta.gid()), has_capabilities(&file), current_user())
    {
        return Err(format!("{shown} {what}, so nothing can be preloaded into it; {instead}"));
    }
    if !head.starts_with(b"\x7fELF") {
        // Not for us to judge: exec will say.
        return Ok(());
    }
    match interpreter(&mut file, &head) {
        Ok(Some(loader)) if loader.contains("ld-musl") => {
            Err(format!("{shown} uses musl libc ({loader}), which netvm run does not cover; {instead}"))
        }
        Ok(Some(_)) => Ok(()),
        Ok(None) => {
            Err(format!("{shown} is statically linked, so nothing can be preloaded into it; {instead}"))
        }
        Err(error) => Err(format!("{shown} is not a sound ELF file: {error}")),
    }
}

/// What a program has that its user has not: then the loader takes nothing from the environment.
fn privileges(
    (mode, owner, group): (u32, u32, u32),
    has_capabilities: bool,
    (uid, gid): (u32, u32),
) -> Option<&'static str> {
    if mode & 0o4000 != 0 && owner != uid {
        return Some("is set-user-ID");
    }
    // Without the right to execute for its group the bit means something else.
    if mode & 0o2010 == 0o2010 && group != gid {
        return Some("is set-group-ID");
    }
    (has_capabilities && uid != 0).then_some("has capabilities")
}

fn has_capabilities(file: &File) -> bool {
    rustix::fs::fgetxattr(file, "security.capability", &mut [0_u8; 64]).is_ok()
}

/// User and group.
fn current_user() -> (u32, u32) {
    std::fs::metadata("/proc/self").map_or((u32::MAX, u32::MAX), |meta| (meta.uid(), meta.gid()))
}

/// The PT_INTERP of a little-endian 64-bit ELF file.
fn interpreter(file: &mut File, head: &[u8]) -> io::Result<Option<String>> {
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    let number = |bytes: &[u8], at: usize, length: usize| -> io::Result<u64> {
        let field = bytes.get(at..at + length).ok_or_else(bad)?;
        Ok(field.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    };
    if head.get(4) != Some(&2) || head.get(5) != Some(&1) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a 64-bit little-endian program"));
    }
    let offset = number(head, 32, 8)?;
    let entry_bytes = number(head, 54, 2)?;
    let entries = number(head, 56, 2)?;
    if entry_bytes < 56 {
        return Err(bad());
    }
    for index in 0..entries {
        let mut entry = [0; 56];
        file.seek(SeekFrom::Start(offset.checked_add(index * entry_bytes).ok_or_else(bad)?))?;
        file.read_exact(&mut entry)?;
        if number(&entry, 0, 4)? == u64::from(PT_INTERP) {
            let length = number(&entry, 32, 8)?.min(4096);
            let mut text = Vec::new();
            file.seek(SeekFrom::Start(number(&entry, 8, 8)?))?;
            file.take(length).read_to_end(&mut text)?;
            return Ok(Some(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gains_privileges_is_refused() {
        for (mode, has_capabilities, user, refused) in [
            (0o755, false, (1, 1), None),
            (0o4755, false, (1, 1), Some("is set-user-ID")),
            (0o4755, false, (5, 6), None),
            (0o2755, false, (5, 1), Some("is set-group-ID")),
            (0o2755, false, (1, 6), None),
            // Mandatory locking, once.
            (0o2745, false, (1, 1), None),
            (0o755, true, (1, 1), Some("has capabilities")),
            (0o755, true, (0, 0), None),
        ] {
            assert_eq!(privileges((mode, 5, 6), has_capabilities, user), refused, "{mode:o} {user:?}");
        }
        assert!(!has_capabilities(&File::open(find("sh").unwrap()).unwrap()));
    }

    #[test]
    fn dynamic_programs_and_scripts_pass() {
        check(&find("sh").unwrap()).unwrap();
        let script = std::env::temp_dir().join(format!("netvm-elf-{}", std::process::id()));
        for (text, fine) in [
            ("#!/usr/bin/env -S sh -e\n", true),
            ("#! /bin/sh\n", true),
            ("#!/nowhere/at/all\n", false),
            ("plain text", true),
            ("\x7fELF\x02\x01 but then rubbish", false),
            ("", true),
        ] {
            std::fs::write(&script, text).unwrap();
            assert_eq!(check(&script).is_ok(), fine, "{text:?}");
        }
        std::fs::write(&script, format!("#!{}\n", script.display())).unwrap();
        assert!(check(&script).unwrap_err().contains("circle"));
        std::fs::remove_file(script).unwrap();
        assert!(find("no-such-program-anywhere").is_err());
        assert!(find("/etc/passwd").is_err());
    }
}
