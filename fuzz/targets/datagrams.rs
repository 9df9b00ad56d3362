#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| netvm::fuzzing::datagrams(data));
