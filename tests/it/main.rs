//! Integration tests, one binary: a module a subject.

// What a test's own helper functions unwrap, they unwrap for the test.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cli_init;
mod dataset;
