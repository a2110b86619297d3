// protoc-gen-openapi is a buf plugin that writes one OpenAPI 3.1 document for all services that have HTTP bindings. It runs
// grpc-gateway's protoc-gen-openapiv3, which writes a document for each proto file, and merges the results. The parameter
// frame=FILE names a YAML file whose content is laid over the document.
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
	"sigs.k8s.io/yaml"
)

// generator is the plugin that does the work. It is built into the directory of this one.
const generator = "protoc-gen-openapiv3"

// output is the name of the document.
const output = "fastsandbox.openapi.json"

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "protoc-gen-openapi:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	raw, err := io.ReadAll(in)
	if err != nil {
		return fmt.Errorf("reading the request: %w", err)
	}
	request := &pluginpb.CodeGeneratorRequest{}
	if err := proto.Unmarshal(raw, request); err != nil {
		return fmt.Errorf("reading the request: %w", err)
	}
	frame, err := readFrame(request.GetParameter())
	if err != nil {
		return err
	}
	documents, err := generate(request)
	if err != nil {
		return err
	}
	merged, err := merge(documents, streams(request.GetProtoFile()), frame)
	if err != nil {
		return err
	}
	response := &pluginpb.CodeGeneratorResponse{
		SupportedFeatures: proto.Uint64(uint64(pluginpb.CodeGeneratorResponse_FEATURE_PROTO3_OPTIONAL)),
		File:              []*pluginpb.CodeGeneratorResponse_File{{Name: proto.String(output), Content: proto.String(string(merged))}},
	}
	if raw, err = proto.Marshal(response); err != nil {
		return fmt.Errorf("writing the response: %w", err)
	}
	_, err = out.Write(raw)
	return err
}

// readFrame returns the content of the file that the parameter names; nil if it names none.
func readFrame(parameter string) (object, error) {
	path, ok := strings.CutPrefix(parameter, "frame=")
	if !ok {
		return nil, nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the frame: %w", err)
	}
	var frame object
	if err := yaml.UnmarshalStrict(raw, &frame); err != nil {
		return nil, fmt.Errorf("reading the frame %s: %w", path, err)
	}
	return frame, nil
}

// generate runs the generator and returns its documents.
func generate(request *pluginpb.CodeGeneratorRequest) ([][]byte, error) {
	own, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding %s: %w", generator, err)
	}
	request = proto.CloneOf(request)
	request.Parameter = nil
	raw, err := proto.Marshal(request)
	if err != nil {
		return nil, fmt.Errorf("calling %s: %w", generator, err)
	}
	var out bytes.Buffer
	command := exec.Command(filepath.Join(filepath.Dir(own), generator))
	command.Stdin, command.Stdout, command.Stderr = bytes.NewReader(raw), &out, os.Stderr
	if err := command.Run(); err != nil {
		return nil, fmt.Errorf("calling %s: %w", generator, err)
	}
	response := &pluginpb.CodeGeneratorResponse{}
	if err := proto.Unmarshal(out.Bytes(), response); err != nil {
		return nil, fmt.Errorf("reading the response of %s: %w", generator, err)
	}
	if response.Error != nil {
		return nil, fmt.Errorf("calling %s: %s", generator, response.GetError())
	}
	var documents [][]byte
	for _, f := range response.GetFile() {
		documents = append(documents, []byte(f.GetContent()))
	}
	return documents, nil
}

// streams returns the methods that answer with a stream, as operation ids name them.
func streams(files []*descriptorpb.FileDescriptorProto) map[string]bool {
	out := map[string]bool{}
	for _, f := range files {
		for _, s := range f.GetService() {
			for _, m := range s.GetMethod() {
				out[s.GetName()+"_"+m.GetName()] = m.GetServerStreaming()
			}
		}
	}
	return out
}
