//! Several versions of a model in one server: by number, by label, by share, and as a shadow.

mod canary;
mod client;
mod kserve;
mod labels;
mod roll_back;
mod shadow;
#[cfg(target_os = "linux")]
mod unloading;
mod versions;
mod world;
