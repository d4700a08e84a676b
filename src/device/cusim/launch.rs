//! A running launch of the simulator, advanced in steps.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::NonNull;

use super::{Argument, Launch, SimError};

unsafe extern "C" {
    fn cusim_begin(
        name: *const c_char,
        grid: *const u32,
        block: *const u32,
        shared_bytes: usize,
        arguments: *mut *mut c_void,
        seed: u64,
        message: *mut c_char,
        message_bytes: usize,
    ) -> *mut c_void;
    fn cusim_advance(launch: *mut c_void, steps: u64, message: *mut c_char, message_bytes: usize) -> c_int;
    fn cusim_end(launch: *mut c_void);
    fn cusim_argument_bytes(name: *const c_char) -> usize;
}

const RUNNING: c_int = 0;
const DONE: c_int = 1;

/// The bytes of a kernel's arguments, or `None` if there is no such kernel.
#[cfg_attr(not(target_os = "linux"), expect(dead_code))]
pub(crate) fn argument_bytes(kernel: &str) -> Option<usize> {
    let name = CString::new(kernel).ok()?;
    // SAFETY: `name` ends with a zero and is only read.
    Some(unsafe { cusim_argument_bytes(name.as_ptr()) }).filter(|&bytes| bytes > 0)
}

/// A running kernel. It stays on the thread that began it, and ends when dropped.
#[derive(Debug)]
pub(crate) struct Running {
    launch: NonNull<c_void>,
    kernel: String,
    /// The launch holds pointers to these: the arguments, and the address of each.
    _arguments: (Vec<Argument>, Box<[*mut c_void]>),
}

impl Running {
    /// Begins a launch.
    ///
    /// # Errors
    /// [`SimError`] if there is no such kernel, or if a block cannot have this size.
    ///
    /// # Safety
    /// `arguments` must be the kernel's parameters, in order and with the right types. While the launch is
    /// advanced, every address among them must point to live memory, as long as the kernel accesses. Memory
    /// that the kernel writes must not be borrowed elsewhere.
    pub(crate) unsafe fn begin(
        kernel: &str,
        launch: Launch,
        arguments: &[Argument],
    ) -> Result<Self, SimError> {
        let arguments = arguments.to_vec();
        let mut parameters: Box<[*mut c_void]> =
            arguments.iter().map(|argument| argument.0.as_ptr().cast_mut().cast()).collect();
        let stopped = |reason| SimError { kernel: kernel.to_owned(), reason };
        let name = CString::new(kernel).map_err(|_| stopped("the name contains a zero byte".to_owned()))?;
        let mut message = Message::default();
        // SAFETY: `name` ends with a zero, the two shapes have three numbers each, and `message` has the
        // given length. Each parameter points at the words of an `Argument`, which live on the heap as long
        // as `Self`. Kernels take parameters by value, so the words are only read.
        let begun = unsafe {
            cusim_begin(
                name.as_ptr(),
                [launch.blocks, 1, 1].as_ptr(),
                [launch.threads, 1, 1].as_ptr(),
                launch.shared_bytes,
                parameters.as_mut_ptr(),
                launch.seed,
                message.0.as_mut_ptr().cast(),
                message.0.len(),
            )
        };
        let Some(launch) = NonNull::new(begun) else { return Err(stopped(message.text())) };
        Ok(Self { launch, kernel: kernel.to_owned(), _arguments: (arguments, parameters) })
    }

    /// Takes at most `steps` steps. Returns whether the launch is done.
    ///
    /// # Errors
    /// [`SimError`] if the kernel deadlocks or breaks a rule of warp operations and barriers.
    pub(crate) fn advance(&mut self, steps: u64) -> Result<bool, SimError> {
        let mut message = Message::default();
        // SAFETY: the launch lives until `drop`, and `Self` is not `Send`, so this is the thread that began
        // it. The caller of `begin` guarantees that the kernel's accesses are in bounds, and that the memory
        // that it writes is not borrowed elsewhere.
        let code = unsafe {
            cusim_advance(self.launch.as_ptr(), steps, message.0.as_mut_ptr().cast(), message.0.len())
        };
        match code {
            RUNNING => Ok(false),
            DONE => Ok(true),
            _ => Err(SimError { kernel: self.kernel.clone(), reason: message.text() }),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // SAFETY: the launch came from `cusim_begin`, and is ended only here.
        unsafe { cusim_end(self.launch.as_ptr()) };
    }
}

/// A message of the simulator, terminated by a zero.
struct Message([u8; 512]);

impl Default for Message {
    fn default() -> Self {
        Self([0; 512])
    }
}

impl Message {
    fn text(&self) -> String {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(self.0.len());
        String::from_utf8_lossy(&self.0[..end]).into_owned()
    }
}
