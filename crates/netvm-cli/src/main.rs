//! netvm
fn main() {}
