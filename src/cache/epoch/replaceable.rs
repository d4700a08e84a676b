//! An object that is replaced as a whole while other threads read it.
//!
//! crossbeam-epoch keeps a replaced object until no thread reads it. What a reader holds cannot leave its
//! thread and delays freeing, so it is held for one call only. A batch lasts longer and uses a
//! [`Pin`](super::Pin) instead.

#![allow(unsafe_code)]

pub(crate) use object::Replaceable;

#[cfg(not(flechette_loom))]
mod object {
    use std::sync::atomic::Ordering;

    /// An object that can be replaced while it is read. Each reader sees the old one or the new one.
    #[derive(Debug)]
    pub(crate) struct Replaceable<T>(crossbeam_epoch::Atomic<T>);

    impl<T: Send + Sync + 'static> Replaceable<T> {
        pub(crate) fn new(object: T) -> Self {
            Self(crossbeam_epoch::Atomic::new(object))
        }

        /// Reads the current object. Never waits.
        pub(crate) fn read(&self) -> Reading<T> {
            let guard = crossbeam_epoch::pin();
            let object = self.0.load(Ordering::Acquire, &guard).as_raw();
            Reading { object, _guard: guard }
        }

        /// Replaces the object for later reads.
        pub(crate) fn replace(&self, object: T) {
            let guard = crossbeam_epoch::pin();
            let old = self.0.swap(crossbeam_epoch::Owned::new(object), Ordering::AcqRel, &guard);
            // SAFETY: `old` was returned by the swap, so no later reading finds it and no other thread
            // retires it; it was made by `Owned::new`. Readings that found it hold guards, which keep it.
            unsafe { guard.defer_destroy(old) };
            // Lets any reader free the old object. It may be large, and this thread may not replace anything
            // again for a long time.
            guard.flush();
        }
    }

    impl<T> Drop for Replaceable<T> {
        fn drop(&mut self) {
            let guard = crossbeam_epoch::pin();
            let last = self.0.swap(crossbeam_epoch::Shared::null(), Ordering::AcqRel, &guard);
            // SAFETY: by `&mut` no new reading can begin, so `last` is not found again; it was made by
            // `Owned::new`. A `Reading` that outlives `self` still has its guard, which keeps it.
            unsafe { guard.defer_destroy(last) };
        }
    }

    /// Read access to an object.
    #[derive(Debug)]
    pub(crate) struct Reading<T> {
        object: *const T,
        _guard: crossbeam_epoch::Guard,
    }

    impl<T> std::ops::Deref for Reading<T> {
        type Target = T;

        #[inline]
        fn deref(&self) -> &T {
            // SAFETY: `object` was loaded from a `Replaceable` under `_guard`, is never null while the
            // `Replaceable` lives, and is destroyed no earlier than the guard is dropped.
            unsafe { &*self.object }
        }
    }
}

/// loom must see each read and each replacement, and does not know those of crossbeam-epoch. Here every
/// object lives as long as its `Replaceable`, so a reader's object is kept, as crossbeam-epoch does it.
#[cfg(flechette_loom)]
mod object {
    use std::sync::{Arc, Mutex, MutexGuard};

    use crate::sync::{AtomicU64, EvenPoisoned, Ordering};

    #[derive(Debug)]
    pub(crate) struct Replaceable<T> {
        /// The place of the current object among all.
        current: AtomicU64,
        /// Lock and `Arc` are those of std, so that loom takes no order of the threads from them.
        all: Mutex<Vec<Arc<T>>>,
    }

    impl<T> Replaceable<T> {
        pub(crate) fn new(object: T) -> Self {
            Self { current: AtomicU64::new(0), all: Mutex::new(vec![Arc::new(object)]) }
        }

        pub(crate) fn read(&self) -> Arc<T> {
            let place = self.current.load(Ordering::Acquire);
            self.all()[place as usize].clone()
        }

        pub(crate) fn replace(&self, object: T) {
            let place = {
                let mut all = self.all();
                all.push(Arc::new(object));
                all.len() as u64 - 1
            };
            self.current.swap(place, Ordering::AcqRel);
        }

        fn all(&self) -> MutexGuard<'_, Vec<Arc<T>>> {
            self.all.lock().even_poisoned()
        }
    }
}
