//! A stub libnvrtc. The image of a kernel is a line with the kernel's name and the compiler options.
//!
//! `PRETEND_ARCHITECTURES` lists the known capabilities, and `PRETEND_COMPILE` is the result code of
//! compilation. Each compilation is written to the file `PRETEND_LOG`. SAFETY, for the whole file: the
//! functions are unsafe, and callers must follow nvrtc.h.

use std::collections::BTreeMap;
use std::ffi::{c_char, CStr};
use std::io::Write;
use std::sync::Mutex;

#[derive(Default)]
struct Program {
    text: String,
    made: String,
}

static PROGRAMS: Mutex<BTreeMap<usize, Program>> = Mutex::new(BTreeMap::new());

const LOG: &[u8] = b"it.cu(1): error:\n  expected a kernel\n\0";

fn setting(name: &str, otherwise: &str) -> String {
    std::env::var(format!("PRETEND_{name}")).unwrap_or_else(|_| otherwise.to_owned())
}

fn architectures() -> Vec<i32> {
    setting("ARCHITECTURES", "75,80,90").split(',').map(|it| it.parse().unwrap()).collect()
}

unsafe fn text(text: *const c_char) -> String {
    CStr::from_ptr(text).to_str().unwrap().to_owned()
}

#[no_mangle]
unsafe extern "C" fn nvrtcVersion(major: *mut i32, minor: *mut i32) -> i32 {
    (*major, *minor) = (13, 0);
    0
}

#[no_mangle]
unsafe extern "C" fn nvrtcGetNumSupportedArchs(to: *mut i32) -> i32 {
    *to = architectures().len() as i32;
    0
}

#[no_mangle]
unsafe extern "C" fn nvrtcGetSupportedArchs(to: *mut i32) -> i32 {
    for (i, architecture) in architectures().into_iter().enumerate() {
        *to.add(i) = architecture;
    }
    0
}

#[no_mangle]
unsafe extern "C" fn nvrtcCreateProgram(
    to: *mut usize,
    source: *const c_char,
    name: *const c_char,
    headers: i32,
    header_texts: *const *const c_char,
    header_names: *const *const c_char,
) -> i32 {
    let mut programs = PROGRAMS.lock().unwrap();
    *to = programs.len() + 1;
    let mut label = text(name);
    assert!(text(source).contains("__global__"));
    for i in 0..headers as usize {
        assert!(text(*header_texts.add(i)).contains("#pragma once"));
        label += &format!(" with {}", text(*header_names.add(i)));
    }
    programs.insert(*to, Program { text: label, made: String::new() });
    0
}

#[no_mangle]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut usize) -> i32 {
    PROGRAMS.lock().unwrap().remove(&*program);
    *program = 0;
    0
}

#[no_mangle]
unsafe extern "C" fn nvrtcCompileProgram(program: usize, count: i32, options: *const *const c_char) -> i32 {
    let mut programs = PROGRAMS.lock().unwrap();
    let program = programs.get_mut(&program).unwrap();
    let options: Vec<String> = (0..count as usize).map(|i| text(*options.add(i))).collect();
    if let Ok(path) = std::env::var("PRETEND_LOG") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        writeln!(file.unwrap(), "compiled {}", program.text).unwrap();
    }
    program.made = format!("{} by {}\0", program.text, options.join(" "));
    setting("COMPILE", "0").parse().unwrap()
}

#[no_mangle]
unsafe extern "C" fn nvrtcGetProgramLogSize(_: usize, to: *mut usize) -> i32 {
    *to = LOG.len();
    0
}

#[no_mangle]
unsafe extern "C" fn nvrtcGetProgramLog(_: usize, to: *mut c_char) -> i32 {
    to.copy_from(LOG.as_ptr().cast(), LOG.len());
    0
}

fn kind(program: usize, kind: &str) -> String {
    format!("{kind} {}", PROGRAMS.lock().unwrap()[&program].made)
}

#[no_mangle]
unsafe extern "C" fn nvrtcGetCUBINSize(program: usize, to: *mut usize) -> i32 {
    *to = kind(program, "binary").len();
    0
}

#[no_mangle]
unsafe extern "C" fn nvrtcGetCUBIN(program: usize, to: *mut c_char) -> i32 {
    let made = kind(program, "binary");
    to.copy_from(made.as_ptr().cast(), made.len());
    0
}

#[no_mangle]
unsafe extern "C" fn nvrtcGetPTXSize(program: usize, to: *mut usize) -> i32 {
    *to = kind(program, "ptx").len();
    0
}

#[no_mangle]
unsafe extern "C" fn nvrtcGetPTX(program: usize, to: *mut c_char) -> i32 {
    let made = kind(program, "ptx");
    to.copy_from(made.as_ptr().cast(), made.len());
    0
}
