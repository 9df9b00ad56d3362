//! netvm
