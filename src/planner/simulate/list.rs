//! Doubly linked lists of keys, with all links in two arrays. The policies use them as queues. A key is in at
//! most one list at a time.

/// In place of a key: the end of a list.
const NONE: u32 = u32::MAX;

/// The links of the keys `0..keys`.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl Links {
    /// Links of keys that are in no list.
    pub(crate) fn new(keys: u32) -> Self {
        Self { before: vec![NONE; keys as usize], after: vec![NONE; keys as usize] }
    }
}

/// One list. The caller knows which keys are in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    front: u32,
    back: u32,
    len: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { front: NONE, back: NONE, len: 0 }
    }
}

impl List {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The key at the back.
    pub(crate) fn back(&self) -> Option<u32> {
        (self.back != NONE).then_some(self.back)
    }

    /// Adds a key at the front. It must be in no list.
    pub(crate) fn push_front(&mut self, links: &mut Links, key: u32) {
        links.before[key as usize] = NONE;
        links.after[key as usize] = self.front;
        match self.front {
            NONE => self.back = key,
            front => links.before[front as usize] = key,
        }
        self.front = key;
        self.len += 1;
    }

    /// Removes a key. It must be in this list.
    pub(crate) fn remove(&mut self, links: &mut Links, key: u32) {
        let (before, after) = (links.before[key as usize], links.after[key as usize]);
        match before {
            NONE => self.front = after,
            before => links.after[before as usize] = after,
        }
        match after {
            NONE => self.back = before,
            after => links.before[after as usize] = before,
        }
        self.len -= 1;
    }

    /// Removes the key at the back.
    pub(crate) fn pop_back(&mut self, links: &mut Links) -> Option<u32> {
        let key = self.back()?;
        self.remove(links, key);
        Some(key)
    }
}

#[cfg(test)]
mod tests;
