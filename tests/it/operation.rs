//! The real program: damaged versions, wrong settings, a drain under load, many clients, and the errors of
//! `score` and `load`.

mod damaged_versions;
mod load;
mod score;
mod settings;
mod under_load;
