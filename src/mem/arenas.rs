//! The arenas of the C library's allocator.
//!
//! glibc gives threads up to eight arenas for each core. Memory that is freed in one arena is only used again
//! by its threads, so a server whose work moves between threads holds what it has needed in each of them.

/// Limits the arenas to one for each core, and two at least. It must be called before threads are started:
/// existing arenas stay.
pub(crate) fn limit_arenas() {
    #[cfg(target_env = "gnu")]
    {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let most = i32::try_from(cores.max(2)).unwrap_or(i32::MAX);
        // SAFETY: mallopt takes two numbers and keeps no pointer. It locks the arena that it changes. The
        // limit itself is a plain variable, which threads read when they allocate for the first time;
        // `cli::run`, the only caller, has started none.
        #[allow(unsafe_code)]
        let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, most) };
    }
}
