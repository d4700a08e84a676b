//! Integration tests, one binary: a module a subject.
// A test fails by panicking, in the functions that tests share too.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cuda_probe;
#[cfg(feature = "cusim")]
mod cusim;
mod tidy;
