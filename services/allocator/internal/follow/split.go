package follow

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var errJSON = errors.New("invalid JSON")

// readSize is how much is read at a time.
const readSize = 1 << 20

// list splits the text of a list while it arrives, without decoding its items.
type list struct {
	source io.Reader
	buffer []byte // what has arrived and is needed
	at     int    // what is next in it
	ended  bool
}

// split calls item with a copy of each item, and returns the metadata of the list.
func split(source io.Reader, item func([]byte) error) (metav1.ListMeta, error) {
	l := &list{source: source}
	var meta *metav1.ListMeta
	err := l.walk('{', '}', func() error {
		raw, err := l.value()
		if err != nil {
			return err
		}
		key := string(raw)
		if err := l.expect(':'); err != nil {
			return err
		}
		switch key {
		case `"metadata"`:
			raw, err := l.value()
			if err != nil {
				return err
			}
			return json.Unmarshal(raw, &meta)
		case `"items"`:
			return l.items(item)
		}
		_, err = l.value()
		return err
	})
	if err == nil && meta == nil {
		err = fmt.Errorf("%w: a list without metadata", errJSON)
	}
	if err != nil {
		return metav1.ListMeta{}, fmt.Errorf("reading a list: %w", err)
	}
	return *meta, nil
}

func (l *list) items(item func([]byte) error) error {
	if c, err := l.peek(); err != nil {
		return err
	} else if c == 'n' { // null: a list without items may have none
		_, err := l.value()
		return err
	}
	return l.walk('[', ']', func() error {
		raw, err := l.value()
		if err != nil {
			return err
		}
		return item(bytes.Clone(raw))
	})
}

// walk reads an object or array and calls f at each of its entries, which reads it.
func (l *list) walk(first, last byte, f func() error) error {
	if err := l.expect(first); err != nil {
		return err
	}
	c, err := l.peek()
	for c != last && err == nil {
		if err := f(); err != nil {
			return err
		}
		if c, err = l.peek(); err != nil || c == last {
			break
		}
		err = l.expect(',')
	}
	if err != nil {
		return err
	}
	return l.expect(last)
}

// peek returns the next byte that is not white space.
func (l *list) peek() (byte, error) {
	for {
		if l.at = space(l.buffer, l.at); l.at < len(l.buffer) {
			return l.buffer[l.at], nil
		}
		if err := l.more(); err != nil {
			return 0, err
		}
	}
}

func (l *list) expect(c byte) error {
	next, err := l.peek()
	if err == nil && next != c {
		err = fmt.Errorf("%w: %q in place of %q", errJSON, next, c)
	}
	l.at++
	return err
}

// value reads one value. The result is valid until the next call.
func (l *list) value() ([]byte, error) {
	if _, err := l.peek(); err != nil {
		return nil, err
	}
	for {
		end, err := skip(l.buffer, l.at)
		if err == nil && end < len(l.buffer) { // something follows each value of a list, so it is complete
			value := l.buffer[l.at:end]
			l.at = end
			return value, nil
		}
		if err := l.more(); err != nil {
			return nil, err
		}
	}
}

// more reads more, and drops what is no longer needed.
func (l *list) more() error {
	if l.ended {
		return io.ErrUnexpectedEOF
	}
	l.buffer = append(l.buffer[:0], l.buffer[l.at:]...)
	l.at = 0
	l.buffer = slices.Grow(l.buffer, readSize)
	n, err := l.source.Read(l.buffer[len(l.buffer):cap(l.buffer)])
	l.buffer = l.buffer[:len(l.buffer)+n]
	if err == io.EOF {
		l.ended = true
		err = nil
	}
	return err
}

// strip removes metadata.managedFields from an object, in place.
func strip(item []byte) ([]byte, error) {
	if item[0] != '{' {
		return item, nil
	}
	const null = "null"
	cutFrom, cutTo := 0, 0
	err := members(item, func(key string, from, to int) error {
		if key != "metadata" || item[from] != '{' {
			return nil
		}
		return members(item[from:to], func(key string, begin, end int) error {
			if key == "managedFields" {
				cutFrom, cutTo = from+begin, from+end
			}
			return nil
		})
	})
	if err != nil || cutTo-cutFrom < len(null) {
		return item, err
	}
	cutFrom += copy(item[cutFrom:], null)
	return append(item[:cutFrom], item[cutTo:]...), nil
}

// members calls f with each member of an object, and where its value is.
func members(b []byte, f func(key string, from, to int) error) error {
	i := space(b, 0)
	if i >= len(b) || b[i] != '{' {
		return errJSON
	}
	if i = space(b, i+1); i < len(b) && b[i] == '}' {
		return nil
	}
	for ; ; i = space(b, i+1) {
		if i >= len(b) || b[i] != '"' {
			return errJSON
		}
		end, err := text(b, i)
		if err != nil {
			return err
		}
		key := string(b[i+1 : end-1])
		if i = space(b, end); i >= len(b) || b[i] != ':' {
			return errJSON
		}
		from := space(b, i+1)
		to, err := skip(b, from)
		if err != nil {
			return err
		}
		if err := f(key, from, to); err != nil {
			return err
		}
		switch i = space(b, to); {
		case i < len(b) && b[i] == '}':
			return nil
		case i >= len(b) || b[i] != ',':
			return errJSON
		}
	}
}

// skip returns where the value at i ends.
func skip(b []byte, i int) (int, error) {
	for depth := 0; i < len(b); i++ {
		switch c := b[i]; c {
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return 0, errJSON
			}
			if depth--; depth == 0 {
				return i + 1, nil
			}
		case '"':
			end, err := text(b, i)
			if err != nil {
				return 0, err
			}
			if depth == 0 {
				return end, nil
			}
			i = end - 1
		default:
			if depth == 0 {
				return literal(b, i)
			}
		}
	}
	return 0, errJSON
}

// text returns where the string at i ends.
func text(b []byte, i int) (int, error) {
	for from := i + 1; ; {
		n := bytes.IndexByte(b[from:], '"')
		if n < 0 {
			return 0, errJSON
		}
		end := from + n
		escapes := 0
		for end-escapes-1 > i && b[end-escapes-1] == '\\' {
			escapes++
		}
		if escapes%2 == 0 {
			return end + 1, nil
		}
		from = end + 1
	}
}

// literal returns where the number, true, false or null at i ends.
func literal(b []byte, i int) (int, error) {
	from := i
	for i < len(b) && bytes.IndexByte([]byte(" \t\r\n,:]}"), b[i]) < 0 {
		i++
	}
	if i == from {
		return 0, errJSON
	}
	return i, nil
}

// space returns where the white space at i ends.
func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\t' || b[i] == '\r' || b[i] == '\n') {
		i++
	}
	return i
}
