//! Programs that are known to end up without far memory: they are told so at once. And those of which only a part can be far.

use std::path::Path;

/// Why this process cannot be part of a run, if so.
pub(crate) fn reason() -> Option<String> {
    let program = std::fs::read_link("/proc/self/exe").ok()?;
    if program.file_name() != Some("java".as_ref()) {
        return None;
    }
    let arguments = std::fs::read(Path::new("/proc/self/cmdline")).unwrap_or_default();
    let mut words: Vec<String> =
        arguments.split(|&byte| byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    for name in ["JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"] {
        words.extend(std::env::var(name).unwrap_or_default().split_whitespace().map(str::to_owned));
    }
    java(words.iter().map(String::as_str))
}

/// Go's runtime in a program with cgo, or in a library that it is linked with. It maps its heap by way of libc, but gives pages back by
/// madvise system calls of its own: pages that are on a lender then would come back as they were, where it counts on zeros.
pub(crate) fn drops_pages_unseen() -> bool {
    // SAFETY: the name is a C string; dlsym returns null or the first definition of the symbol, dlerror only forgets that there was none.
    unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"_cgo_topofstack".as_ptr());
        libc::dlerror();
        !found.is_null()
    }
}

/// The last word on a collector counts.
fn java<'a>(words: impl Iterator<Item = &'a str>) -> Option<String> {
    let mut uses_zgc = false;
    for word in words {
        match word {
            "-XX:+UseZGC" => uses_zgc = true,
            "-XX:-UseZGC" => uses_zgc = false,
            _ => {}
        }
    }
    uses_zgc.then(|| {
        "Java's ZGC keeps its heap in shared memory at addresses of its own choice, which is never far memory; use \
         -XX:+UseG1GC, -XX:+UseParallelGC or -XX:+UseSerialGC"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zgc_is_refused_and_others_are_not() {
        let said = java(["java", "-XX:+UseZGC", "-Xmx1g", "Main"].into_iter()).unwrap();
        assert!(said.contains("ZGC") && said.contains("-XX:+UseG1GC"));
        for words in [&["java", "-XX:+UseG1GC", "Main"][..], &["java", "-XX:+UseZGC", "-XX:-UseZGC", "Main"]]
        {
            assert_eq!(java(words.iter().copied()), None);
        }
    }
}
