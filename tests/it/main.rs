//! Integration tests, one binary: a module a subject.
// A test fails by panicking, in the functions that tests share too.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[cfg(feature = "cusim")]
mod cusim;
mod tidy;
