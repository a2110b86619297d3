package rpc_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

func bytesField(number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), value)
}

// TestCodecBoundsLists: a list that is continued half a million times would be copied as often.
func TestCodecBoundsLists(t *testing.T) {
	const phases, spec, ports = 4, 3, 7
	continued := bytesField(phases, []byte{1, 1, 1, 1})
	create := (&sandboxv1.CreateSandboxRequest{}).ProtoReflect().Descriptor().Fields().ByName("spec")
	require.EqualValues(t, spec, create.Number())
	require.EqualValues(t, ports, create.Message().Fields().ByName("ports").Number())
	merged := bytesField(spec, bytesField(ports, []byte{80}))
	unpacked := protowire.AppendVarint(protowire.AppendTag(nil, phases, protowire.VarintType), 1)
	for name, tc := range map[string]struct {
		into    proto.Message
		message []byte
		err     string
	}{
		"continued":                          {&sandboxv1.ListSandboxesRequest{}, bytes.Repeat(continued, 500_000), "fastsandbox.sandbox.v1.ListSandboxesRequest.phases is continued"},
		"continued in a message that merges": {&sandboxv1.CreateSandboxRequest{}, bytes.Repeat(merged, 500_000), "ports is continued"},
		"a small message":                    {&sandboxv1.ListSandboxesRequest{}, bytes.Repeat(continued, 100), ""},
		"a few times":                        {&sandboxv1.ListSandboxesRequest{}, bytes.Repeat(bytesField(phases, bytes.Repeat([]byte{1}, 1<<10)), 16), ""},
		"numbers one by one":                 {&sandboxv1.ListSandboxesRequest{}, bytes.Repeat(unpacked, 500_000), ""},
		"no message":                         {&sandboxv1.ListSandboxesRequest{}, bytes.Repeat([]byte{0xff}, 1<<20), "cannot parse"},
	} {
		t.Run(name, func(t *testing.T) {
			err := rpc.NewCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(tc.message)}, tc.into)
			if tc.err == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, tc.err)
		})
	}
}

// TestCodecKeepsMessages: what the API's clients encode is decoded, however many lists it has.
func TestCodecKeepsMessages(t *testing.T) {
	full := &agentv1.AgentSnapshot{Info: &agentv1.AgentInfo{ReservedPorts: []int32{1, 2, 3}}}
	for range 5000 {
		full.Sandboxes = append(full.Sandboxes, &agentv1.SandboxReport{Record: &agentv1.SandboxRecord{Name: "a", Spec: &sandboxv1.SandboxSpec{Ports: []int32{80, 443}}}})
	}
	raw, err := proto.Marshal(full)
	require.NoError(t, err)
	out := &agentv1.AgentSnapshot{}
	half := len(raw) / 2
	require.NoError(t, rpc.NewCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(raw[:half]), mem.SliceBuffer(raw[half:])}, out))
	require.True(t, proto.Equal(full, out))
}

// FuzzCodec decodes arbitrary bytes: what gRPC's own codec refuses is refused, and what is accepted is the same message.
func FuzzCodec(f *testing.F) {
	raw, err := proto.Marshal(&sandboxv1.CreateSandboxRequest{Namespace: "a", Spec: &sandboxv1.SandboxSpec{Ports: []int32{80, 443}}})
	require.NoError(f, err)
	f.Add(raw, uint16(0))
	f.Add(bytesField(3, bytesField(7, []byte{80})), uint16(17))
	f.Fuzz(func(t *testing.T, message []byte, times uint16) {
		if message = bytes.Repeat(message, 1+int(times)%2000); len(message) > 1<<20 {
			return
		}
		own, other := &sandboxv1.CreateSandboxRequest{}, &sandboxv1.CreateSandboxRequest{}
		err := rpc.NewCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(message)}, own)
		want := proto.Unmarshal(message, other)
		switch {
		case want != nil:
			require.Error(t, err)
		case err == nil:
			require.True(t, proto.Equal(own, other))
		default:
			require.Regexp(t, "is continued more than|is nested more than", err.Error())
		}
	})
}

// TestBytesOfFrame: the value of a field is found in a message of several buffers, and what is no message is refused.
func TestBytesOfFrame(t *testing.T) {
	c := rpc.NewCodec()
	raw, err := proto.Marshal(&sandboxv1.GetSandboxRequest{Namespace: "ns", Name: strings.Repeat("x", 10_000)})
	require.NoError(t, err)
	read := func(message []byte, field protowire.Number) (got []byte, err error) {
		frame := &rpc.Frame{}
		half := len(message) / 2
		data := mem.BufferSlice{mem.SliceBuffer(message[:half]), mem.SliceBuffer(message[half:])}
		require.NoError(t, c.Unmarshal(data, frame))
		data.Free()
		err = frame.Bytes(field, func(b []byte) error {
			got = bytes.Clone(b)
			return nil
		})
		return got, err
	}
	for field, want := range map[protowire.Number]string{1: "ns", 2: strings.Repeat("x", 10_000), 3: ""} {
		got, err := read(raw, field)
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
	_, err = read(raw[:len(raw)-1], 1)
	require.Error(t, err)
	got, err := read(nil, 1)
	require.NoError(t, err)
	require.Empty(t, got)
}

// TestFramePassesThrough: what comes as a frame goes as the same bytes, once.
func TestFramePassesThrough(t *testing.T) {
	c := rpc.NewCodec()
	want := &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: strings.Repeat("x", 10_000)}
	data, err := c.Marshal(want)
	require.NoError(t, err)
	frame, got := &rpc.Frame{}, &sandboxv1.GetSandboxRequest{}
	require.NoError(t, c.Unmarshal(data, frame))
	data.Free() // as gRPC does
	passed, err := c.Marshal(frame)
	require.NoError(t, err)
	require.NoError(t, c.Unmarshal(passed, got))
	require.Empty(t, cmp.Diff(want, got, protocmp.Transform()))
	passed.Free()
	again, err := c.Marshal(frame)
	require.NoError(t, err)
	require.Zero(t, again.Len())
}
