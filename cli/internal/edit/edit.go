// Package edit has a person edit a text in an editor until it is valid, as `kubectl edit` does. It never interprets the
// text: its caller checks it. Loop may be called concurrently, but a terminal has room for one editor.
package edit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// ErrUnchanged and ErrEmpty end an edit: the person did not change the text, or removed all of it.
var (
	ErrUnchanged = errors.New("no changes were made")
	ErrEmpty     = errors.New("the saved file was empty")
)

// Editor is how a text is edited.
type Editor struct {
	// Command is the editor, with its arguments. A shell executes it with the file as an additional argument.
	Command string
	// Pattern is the name of the temporary file, as os.CreateTemp takes it.
	Pattern string
	// In, Out and Err are the standard streams of the editor.
	In       io.Reader
	Out, Err io.Writer
}

// Loop opens text in the editor and passes what was saved to check. If check returns an error for which retry reports true,
// the editor opens again with the saved text and the error as a comment. Loop returns ErrEmpty or ErrUnchanged if nothing
// but comments and blank lines is left or has changed; after an error of check, an unchanged text returns that error.
// Loop blocks until the editor ends.
func (e Editor) Loop(ctx context.Context, text []byte, check func([]byte) error, retry func(error) bool) error {
	shown := text
	var last error
	for {
		saved, err := e.once(ctx, shown)
		if err != nil {
			return err
		}
		switch content := stripped(saved); {
		case len(content) == 0:
			return ErrEmpty
		case bytes.Equal(content, stripped(shown)) && last != nil:
			return last
		case bytes.Equal(content, stripped(shown)):
			return ErrUnchanged
		}
		if last = check(saved); last == nil || !retry(last) {
			return last
		}
		shown = withError(saved, last)
	}
}

// once has the text edited once.
func (e Editor) once(ctx context.Context, text []byte) (saved []byte, err error) {
	f, err := os.CreateTemp("", e.Pattern)
	if err != nil {
		return nil, fmt.Errorf("creating a file to edit: %w", err)
	}
	defer func() { err = errors.Join(err, os.Remove(f.Name())) }()
	_, err = f.Write(text)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("writing the file to edit: %w", err)
	}
	command := exec.CommandContext(ctx, "/bin/sh", "-c", e.Command+` "$1"`, "sh", f.Name())
	command.Stdin, command.Stdout, command.Stderr = e.In, e.Out, e.Err
	if err := command.Run(); err != nil {
		return nil, fmt.Errorf("running the editor %s: %w", e.Command, err)
	}
	if saved, err = os.ReadFile(f.Name()); err != nil {
		return nil, fmt.Errorf("reading the edited file: %w", err)
	}
	return saved, nil
}

// mark begins the lines that withError adds.
const mark = "# error: "

// withError returns the text with the error as a comment above it, in place of that of an earlier edit.
func withError(text []byte, err error) []byte {
	var b bytes.Buffer
	for line := range strings.Lines(strings.TrimSpace(err.Error())) {
		b.WriteString(mark + strings.TrimRight(line, "\n") + "\n")
	}
	for line := range bytes.Lines(text) {
		if !bytes.HasPrefix(line, []byte(mark)) {
			b.Write(line)
		}
	}
	return b.Bytes()
}

// stripped returns the text without comment lines and blank lines.
func stripped(text []byte) []byte {
	var b bytes.Buffer
	for line := range bytes.Lines(text) {
		if content := bytes.TrimSpace(line); len(content) > 0 && content[0] != '#' {
			b.Write(line)
		}
	}
	return bytes.TrimSpace(b.Bytes())
}
