//! A seeded network for tests: delay, reordering across rails, disconnection at any byte.
