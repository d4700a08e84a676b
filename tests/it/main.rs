//! Integration tests, one binary: a module a subject.

#[cfg(feature = "cusim")]
mod cusim;
mod tidy;
